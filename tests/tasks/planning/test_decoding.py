"""Clocks of parts: against times by hand, and what happens to responses as parts come and go."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.crew_model.step_time import StepTime
from tasks.planning.decoding import Decoded, Part, decoded
from tasks.planning.makespan import member_time_s
from tests.planning_requests import a_part

RISING = StepTime(((1, 0.01), (64, 0.02)))
# No more tokens per second beyond a batch of 8.
FULL_AT_8 = StepTime(((1, 0.01), (8, 0.02), (64, 0.16)))
MEMBER = a_part(step_time=RISING)
ENGINES = replace(MEMBER, count=2, end_s=2.0, is_crew=False)


def run(lengths: list[float], *parts: Part, weight: float = 1.0, uneven: float = 1.0, leaves: bool = False) -> Decoded:
    return decoded(lengths, parts, weight=weight, unevenness=lambda _: uneven, leaves=leaves)


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=40),
    st.sampled_from([RISING, FULL_AT_8]),
    st.integers(1, 48),
    st.floats(0, 50),
)
def test_one_member_takes_as_long_as_by_hand(lengths, step_time, responses_max, start_s):
    member = replace(MEMBER, step_time=step_time, responses_max=responses_max, start_s=start_s)
    found = run([float(length) for length in lengths], member)
    assert max(found.ends_s) == pytest.approx(start_s + member_time_s(lengths, step_time, responses_max))
    assert found.busy_s == pytest.approx(max(found.ends_s) - start_s)


def test_members_that_are_alike_share_evenly_and_so_do_responses_that_stand_for_several():
    lengths = [400.0] * 16 + [100.0] * 16
    members = replace(MEMBER, count=4)
    four = run(lengths, members)
    assert max(four.ends_s) == pytest.approx(member_time_s([400.0] * 4 + [100.0] * 4, RISING, 64))
    assert max(run(lengths[::4], replace(MEMBER, count=4), weight=4.0).ends_s) == pytest.approx(max(four.ends_s))
    assert four.busy_s == pytest.approx(4 * max(four.ends_s))
    assert four.kept_by == [members] * 32


def test_what_waits_goes_to_whoever_comes():
    full = replace(MEMBER, responses_max=4)
    alone = run([100.0] * 8, full)
    both = run([100.0] * 8, full, replace(full, start_s=0.5))
    first_s = 100 * RISING.step_s(4)
    assert max(alone.ends_s) == pytest.approx(2 * first_s)
    assert max(both.ends_s) == pytest.approx(0.5 + first_s)
    # Nothing says any more that all keep what they were dealt.
    assert alone.kept_by[4:] == [None] * 4


def test_whoever_comes_finds_nothing_where_all_run_unless_their_holder_is_too_full():
    late = replace(MEMBER, start_s=0.5)
    assert max(run([100.0] * 32, MEMBER, late).ends_s) == pytest.approx(100 * RISING.step_s(32))
    full, late = (replace(part, step_time=FULL_AT_8) for part in (MEMBER, late))
    alone = run([100.0] * 32, full)
    found = run([100.0] * 32, full, late)
    assert max(found.ends_s) < 0.8 * max(alone.ends_s)
    # What moved was not kept.
    assert None in found.kept_by


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=40),
    st.lists(st.floats(0, 8, exclude_min=True), min_size=1, max_size=4),
    st.booleans(),
)
def test_parts_that_come_and_go_with_nothing_to_do_change_nothing(lengths, starts_s, leaves):
    comers = [replace(MEMBER, start_s=start_s, end_s=start_s + 1.0, is_crew=False) for start_s in starts_s]
    tokens = [float(length) for length in lengths]
    found, alone = run(tokens, MEMBER, *comers, leaves=leaves), run(tokens, MEMBER, leaves=leaves)
    assert found.ends_s == pytest.approx(alone.ends_s)
    assert found.busy_s == pytest.approx(alone.busy_s)
    assert found.kept_by == alone.kept_by


def test_which_responses_are_long_is_not_known_to_who_takes_some():
    """Half are taken; the longest one stays."""
    full = replace(MEMBER, step_time=FULL_AT_8)
    late = replace(full, step_time=FULL_AT_8.scaled(2.0), start_s=0.5)
    found = run([100.0] * 31 + [1000.0], full, late)
    # At first both decode sixteen, and the later one is slower.
    tokens = 100 - 0.5 / FULL_AT_8.step_s(32)
    assert found.ends_s.count(max(found.ends_s)) == 1
    assert sorted(found.ends_s)[:15] == pytest.approx([0.5 + tokens * FULL_AT_8.step_s(16)] * 15)
    assert sorted(found.ends_s)[15:31] == pytest.approx([0.5 + tokens * 2 * FULL_AT_8.step_s(16)] * 16)
    # No member has what it was dealt any more.
    assert found.kept_by == [None] * 32


def test_one_helper_takes_from_one_holder_and_from_one_that_has_something_to_spare():
    full = replace(MEMBER, step_time=FULL_AT_8)
    crowd, late = replace(full, count=8), replace(full, start_s=0.5)
    # Each of eight has 40, of which a member without any takes half; they have 5 tokens by then.
    found = run([100.0] * 320, crowd, late)
    assert min(found.ends_s) == pytest.approx(0.5 + 95 * FULL_AT_8.step_s(20))
    # The fullest has nothing to spare, but another has.
    found = run([100.0] * 64, MEMBER, replace(full, responses_max=24), late)
    # It gives twelve. When the fullest has ended what it had, it takes four of twelve, and then of the other twelve.
    all_s = 100 * RISING.step_s(40)
    assert sorted(found.ends_s)[:40] == pytest.approx([all_s] * 40)
    left = 100 - 0.5 / FULL_AT_8.step_s(24) - (all_s - 0.5) / FULL_AT_8.step_s(12)
    assert sorted(found.ends_s)[40:44] == pytest.approx([all_s + left * RISING.step_s(4)] * 4)
    assert sorted(found.ends_s)[44] > sorted(found.ends_s)[43] + 0.1


def test_a_fast_member_relieves_a_slow_one_and_a_slow_one_no_fast_one():
    slow = replace(MEMBER, step_time=RISING.scaled(10.0))
    assert max(run([100.0] * 8, slow, replace(MEMBER, start_s=0.5)).ends_s) < 0.5 * max(run([100.0] * 8, slow).ends_s)
    found = run([100.0] * 8, MEMBER, replace(slow, start_s=0.5))
    assert found.ends_s == run([100.0] * 8, MEMBER).ends_s
    assert found.kept_by == [MEMBER] * 8


def test_a_response_that_stands_for_more_than_have_room_takes_the_time_of_all_of_them():
    for weight, responses_max in ((200.0, 64), (16.0, 24), (3.0, 64)):
        few = replace(MEMBER, responses_max=responses_max)
        all_s = member_time_s([100.0] * round(8 * weight), RISING, responses_max)
        assert max(run([100.0] * 8, few, weight=weight).ends_s) == pytest.approx(all_s, rel=0.15)
    # As for a member that is there for a tenth of the time.
    assert max(run([100.0], replace(MEMBER, count=0.1, responses_max=1)).ends_s) == pytest.approx(10 * 100 * 0.01)


def test_what_others_have_decoded_is_prefilled_first_and_what_nobody_has_is_not():
    slow = replace(MEMBER, prefill_tokens_per_s=100.0)
    assert run([100.0] * 8, slow).ends_s == run([100.0] * 8, MEMBER).ends_s
    engines, crew = replace(ENGINES, count=1), replace(slow, count=2, start_s=2.0)
    tokens = 2.0 / RISING.step_s(8)
    found = run([400.0] * 8, engines, crew)
    # Each of two members prefills what four responses have got, and decodes nothing meanwhile.
    prefill_s = 4 * tokens / 100.0
    assert found.ends_s == pytest.approx([2.0 + prefill_s + (400.0 - tokens) * RISING.step_s(4)] * 8)
    assert found.busy_s == pytest.approx(2 * (max(found.ends_s) - 2.0))
    # Who comes meanwhile does not disturb it.
    assert run([400.0] * 8, engines, crew, replace(MEMBER, start_s=2.5)).ends_s == pytest.approx(found.ends_s)
    # So does who takes some from a member that is too full.
    full = replace(MEMBER, step_time=FULL_AT_8)
    late = replace(full, start_s=0.5, prefill_tokens_per_s=100.0)
    at_once, later = run([100.0] * 32, full, replace(full, start_s=0.5)), run([100.0] * 32, full, late)
    assert min(later.ends_s) == pytest.approx(min(at_once.ends_s))
    assert max(later.ends_s) > max(at_once.ends_s) + 0.2


def test_responses_that_end_as_their_part_stops_are_not_handed_on():
    ends_s = 100 * RISING.step_s(1)
    found = run([100.0], replace(MEMBER, end_s=ends_s), replace(MEMBER, start_s=50.0))
    assert found.ends_s == pytest.approx([ends_s])


def test_what_a_part_leaves_behind_is_shared_evenly_by_those_that_stay():
    crew = replace(MEMBER, count=4, start_s=2.0)
    found = run([400.0] * 32, ENGINES, crew)
    done = 2.0 / RISING.step_s(16)
    assert max(found.ends_s) == pytest.approx(2.0 + (400.0 - done) * RISING.step_s(8))
    assert found.kept_by == [None] * 32
    assert found.busy_s == pytest.approx(4 * (max(found.ends_s) - 2.0))


def test_the_last_member_of_a_part_that_stops_has_decoded_less():
    crew = replace(MEMBER, start_s=1.0)
    even, uneven = (run([400.0] * 32, ENGINES, crew, uneven=uneven) for uneven in (1.0, 1.5))
    assert max(uneven.ends_s) > max(even.ends_s)
    # Half of them are of the last of two members.
    later = [a for a, b in zip(uneven.ends_s, even.ends_s, strict=True) if a > max(even.ends_s) + 1e-9]
    assert len(later) == 16


def test_members_that_leave_keep_their_batch_and_are_busy_less():
    crew = replace(MEMBER, count=8)
    lengths = [100.0 * (1 + k % 8) for k in range(64)]
    stays, leaves = run(lengths, crew), run(lengths, crew, leaves=True)
    # To the end they decode as many together as in the beginning.
    assert max(leaves.ends_s) == pytest.approx(800 * RISING.step_s(8))
    assert max(leaves.ends_s) > max(stays.ends_s)
    # Each leaves when its own have ended, a hundred tokens after the one before it.
    assert leaves.busy_s == pytest.approx(sum(100 * (1 + k) * RISING.step_s(8) for k in range(8)))
    assert stays.busy_s == pytest.approx(8 * max(stays.ends_s))
    assert leaves.kept_by == [None] * 64


def test_parts_that_all_end_too_soon_are_refused():
    with pytest.raises(ValueError, match="parts: all 1 end before the responses; allowed: one that does not"):
        run([4000.0], ENGINES)
