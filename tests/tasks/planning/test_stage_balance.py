from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.stage_balance import SLACK, balance_step


def test_one_more_when_generation_is_longer_by_at_least_what_it_saves():
    step = balance_step(200.0, 100.0, one_more_s=150.0, one_less_s=300.0)
    assert (step.change, step.delta_s, step.saved_s) == (1, 100.0, 50.0)
    assert balance_step(130.0, 100.0, one_more_s=90.0, one_less_s=200.0).change == 0
    assert balance_step(200.0, 100.0, one_more_s=100.0, one_less_s=None).change == 1


def test_nobody_is_added_who_saves_nothing_or_is_not_there():
    assert balance_step(200.0, 100.0, one_more_s=200.0, one_less_s=None).change == 0
    assert balance_step(200.0, 100.0, one_more_s=None, one_less_s=250.0).change == 0


def test_one_less_when_generation_is_still_not_longer_than_training():
    assert balance_step(60.0, 100.0, one_more_s=50.0, one_less_s=80.0).change == -1
    assert balance_step(60.0, 100.0, one_more_s=50.0, one_less_s=99.0).change == 0
    assert balance_step(60.0, 100.0, one_more_s=50.0, one_less_s=None).change == 0


@pytest.mark.parametrize(("generation_s", "train_s"), [(-1.0, 1.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_impossible_times_are_refused(generation_s, train_s):
    with pytest.raises(ValueError, match="generation_s, train_s"):
        balance_step(generation_s, train_s, one_more_s=None, one_less_s=None)


def counts_taken(start, tail_s, work_s, train_s, noise):
    """The counts of 40 iterations of a plant whose generation takes tail_s + work_s / n, by so much noise."""
    count, taken = start, [start]
    for k in range(40):
        times = {n: (tail_s + work_s / n) * noise[k % len(noise)] for n in (count - 1, count, count + 1) if n}
        less_s = times[count - 1] if count > 1 else None
        more_s = times[count + 1] if count < 32 else None
        count += balance_step(times[count], train_s, one_more_s=more_s, one_less_s=less_s).change
        taken.append(count)
    return taken


@given(
    st.integers(1, 32),
    st.floats(0, 200),
    st.floats(1, 3000),
    st.floats(10, 300),
    st.lists(st.floats(1 - SLACK / 4, 1 + SLACK / 4), min_size=1, max_size=9),
)
def test_it_comes_to_rest_and_never_turns_back(start, tail_s, work_s, train_s, noise):
    taken = counts_taken(start, tail_s, work_s, train_s, noise)
    changes = {b - a for a, b in pairwise(taken)}
    assert changes in ({0}, {1}, {-1}, {0, 1}, {0, -1})
    assert all(1 <= count <= 32 for count in taken)


def test_it_ends_where_one_more_would_be_half_idle():
    """Generation takes 1000 / n: of 5 it takes 200, which is 15 too long, and a sixth would save 33."""
    assert counts_taken(1, 0.0, 1000.0, 185.0, [1.0])[-1] == 5
    assert counts_taken(20, 0.0, 1000.0, 185.0, [1.0])[-1] == 6
