"""Estimates: sums by hand where members are alike, and what each of them leaves out or counts."""

from dataclasses import replace

import numpy as np
import pytest

from storage.records.planning_records import SeedingRecord
from tasks.crew_model.step_time import StepTime
from tasks.planning.capacity import GroupLengths, TrainerCapacity
from tasks.planning.estimate import HORIZON, Estimate, Estimator
from tasks.planning.makespan import member_time_s
from tasks.planning.request import PlanningRequest
from tests.planning_requests import CURVE, RULES, a_pool, a_request, alike_lengths, some_lengths, waits

RESERVED = TrainerCapacity(engines=2, usd_per_h=16.0, responses_max=64, step_time=CURVE)
NO_SPREAD = GroupLengths("none", np.full(32, 400.0), np.full(32, 400.0))
COLOCATED = SeedingRecord(seeding_s=None, members=0)


def estimated(request: PlanningRequest, *counts: int, seeding: SeedingRecord | None = None) -> Estimate:
    return Estimator(request).estimate(counts, seeding)


def test_of_responses_alike_it_is_exact():
    """128 responses on two members of 64."""
    found = estimated(a_request(a_pool(), lengths=NO_SPREAD), 2)
    assert found.rollout_s == pytest.approx(30.0 + member_time_s([400.0] * 64, CURVE, 64))


def test_responses_that_wait_for_their_turn_take_as_long_as_a_member_takes():
    request = a_request(a_pool(responses_max=16), lengths=some_lengths(32))
    decode_s = estimated(request, 1).rollout_s - 30.0
    expected_s = member_time_s(np.sort(request.responses, axis=None)[::-1], CURVE, 16)
    assert decode_s == pytest.approx(expected_s, rel=0.1)


def test_whoever_comes_later_helps_from_then_on():
    alone_s = estimated(a_request(a_pool(start_s=0.0), lengths=NO_SPREAD), 1).rollout_s
    both_s = estimated(a_request(a_pool(start_s=0.0), lengths=NO_SPREAD), 2).rollout_s
    pools = a_pool(start_s=0.0), a_pool("late", start_s=both_s / 2)
    late_s = estimated(a_request(*pools, lengths=NO_SPREAD), 1, 1).rollout_s
    assert both_s < late_s < alone_s
    too_late = a_pool(start_s=0.0), a_pool("late", start_s=2 * alone_s)
    assert estimated(a_request(*too_late, lengths=NO_SPREAD), 1, 1).rollout_s == pytest.approx(alone_s)


def test_a_new_machine_starts_first_and_one_that_is_there_does_not():
    request = a_request(a_pool(machine_start_s=1000.0), lengths=NO_SPREAD)
    there = replace(request, pools=(a_pool(machine_start_s=1000.0, machines_present=4),))
    none_there = replace(request, pools=(a_pool(machine_start_s=1000.0, machines_present=0),))
    settled = estimated(there, 2)
    started = estimated(none_there, 2)
    assert estimated(request, 2) == settled
    assert started.iteration_s == pytest.approx(settled.iteration_s + 1000.0)
    assert settled.lasting_s == settled.iteration_s
    # Its start is shared by the iterations for which the crew is expected to stay.
    shared_s = settled.lasting_s + 1000.0 / HORIZON
    assert started.lasting_s == pytest.approx(shared_s)
    asked = replace(none_there, planned_width=(("rollout", 2),))
    assert estimated(asked, 2).lasting_s == settled.lasting_s


def test_a_start_longer_than_an_iteration_counts_for_as_many_as_it_lasts():
    helped = a_request(
        a_pool(count_max=8, machine_start_s=3000.0, machines_present=0),
        lengths=NO_SPREAD,
        reserved=RESERVED,
        train_s=1.0,
    )
    alone_s = estimated(helped, 0, seeding=COLOCATED).lasting_s
    with_members = estimated(helped, 8, seeding=replace(COLOCATED, members=8))
    assert with_members.iteration_s == pytest.approx(alone_s)
    assert with_members.lasting_s == pytest.approx(alone_s)


def test_kept_machines_are_paid_for_from_plan_to_plan_and_others_while_they_work():
    kept = a_request(a_pool(), lengths=NO_SPREAD, train_s=500.0, control_s=40.0)
    released = replace(kept, pools=(a_pool(kept=False, machine_start_s=10.0),))
    found = estimated(kept, 2)
    assert found.iteration_s > 540.0
    assert found.usd_rollout == found.usd_iteration == pytest.approx(2 * 2.0 * found.iteration_s / 3600)
    other = estimated(released, 2)
    assert other.rollout_s == pytest.approx(found.rollout_s + 10.0)
    assert other.usd_rollout == pytest.approx(2 * 2.0 * other.rollout_s / 3600)


def test_only_machines_that_are_expected_to_come_are_paid_for():
    scarce = a_pool(kept=False, count_max=4, available=2)
    found = estimated(a_request(scarce, lengths=NO_SPREAD), 4)
    two = estimated(a_request(replace(scarce, available=None), lengths=NO_SPREAD), 2)
    assert found.rollout_s == pytest.approx(two.rollout_s)
    assert found.machines_s == pytest.approx(two.machines_s)


def test_the_trainers_machines_are_paid_for_from_plan_to_plan():
    request = a_request(a_pool(usd_per_h=0.0), lengths=NO_SPREAD, reserved=RESERVED, train_s=50.0, usd_no_machine=0.5)
    found = estimated(request, 2)
    assert found.usd_iteration == pytest.approx(0.5 + 16 * found.iteration_s / 3600)


def test_the_trainers_engines_generate_until_training_begins():
    request = a_request(a_pool(start_s=0.0), lengths=NO_SPREAD, reserved=RESERVED, train_s=0.0)
    alone, helped = estimated(request, 2), estimated(request, 2, seeding=SeedingRecord(seeding_s=9.0, members=2))
    always = estimated(request, 2, seeding=SeedingRecord(seeding_s=None, members=2))
    assert alone.rollout_s > helped.rollout_s == always.rollout_s
    # What they leave behind waits for the members' next look, and is prefilled again: longer than what they save.
    briefly = estimated(request, 2, seeding=SeedingRecord(seeding_s=3.0, members=2))
    assert alone.rollout_s < briefly.rollout_s < 1.2 * alone.rollout_s
    # For as long as nothing else is there, they cannot stop.
    none = replace(request, pools=(a_pool(start_s=0.0, available=0),))
    stays = estimated(none, 2, seeding=SeedingRecord(seeding_s=3.0, members=0))
    assert stays.rollout_s == estimated(request, 0, seeding=COLOCATED).rollout_s


def test_engines_that_wait_for_a_member_to_hand_over_to_train_later():
    request = a_request(
        a_pool(machine_start_s=3000.0, machines_present=0),
        lengths=NO_SPREAD,
        reserved=RESERVED,
        train_s=10.0,
        overlaps=True,
    )
    found = estimated(request, 2, seeding=SeedingRecord(seeding_s=1.0, members=2))
    alone = replace(request, overlaps=False)
    decoded_s = estimated(alone, 2, seeding=SeedingRecord(seeding_s=1.0, members=2)).rollout_s
    # They begin when the iteration before is trained, and training begins when they have ended.
    assert found.rollout_s == found.iteration_s == pytest.approx(decoded_s + 10.0)


def test_engines_of_a_trainer_that_trains_the_iteration_before_come_later_or_not_at_all():
    request = a_request(a_pool(), lengths=NO_SPREAD, reserved=RESERVED, train_s=20.0, control_s=1.0, overlaps=True)
    crew_s = estimated(request, 2).rollout_s
    helped = estimated(request, 2, seeding=replace(COLOCATED, members=2))
    assert 21.0 < helped.rollout_s < crew_s
    assert helped.iteration_s == helped.rollout_s
    # A crew that stands comes as late as they do.
    assert (
        estimated(replace(request, crew="standing"), 2, seeding=replace(COLOCATED, members=2)).rollout_s
        < helped.rollout_s
    )
    # Where training ended soon after the last response, it will again.
    soon = replace(request, waits=waits(behind_s=5.0))
    late = replace(request, waits=waits(behind_s=500.0))
    assert (soon.trainer_busy_s, request.trainer_busy_s, late.trainer_busy_s) == (6.0, 21.0, 21.0)
    assert estimated(soon, 2, seeding=COLOCATED).rollout_s < estimated(request, 2, seeding=COLOCATED).rollout_s
    slow = replace(request, train_s=crew_s)
    assert estimated(slow, 2, seeding=replace(COLOCATED, members=2)).rollout_s == pytest.approx(crew_s)
    # Nothing is left to seed.
    assert estimated(slow, 2, seeding=SeedingRecord(seeding_s=50.0, members=2)).iteration_s == pytest.approx(
        crew_s + 1.0
    )


def test_whoever_comes_later_finds_nothing_where_all_run_and_their_holders_are_not_too_full():
    lengths = GroupLengths("none", np.full(8, 400.0), np.full(8, 400.0))
    rising = StepTime(((1, 0.01), (64, 0.02)))
    early = a_pool(start_s=0.0, step_time=rising)
    late = a_pool("late", start_s=1.0, step_time=rising)
    request = a_request(early, late, lengths=lengths)
    alone_s = estimated(request, 1, 0).rollout_s
    assert estimated(request, 1, 1).rollout_s == pytest.approx(alone_s, rel=0.01)
    # Two that begin together share.
    assert estimated(request, 2, 0).rollout_s < alone_s


def test_more_members_that_come_later_make_it_shorter():
    full_at_8 = StepTime(((1, 0.01), (8, 0.02), (64, 0.16)))
    long_and_short = np.full((32, 4), 100.0)
    long_and_short[np.random.default_rng(0).permutation(32)[:16]] = 1000.0
    pools = [a_pool(pool, start_s=s, step_time=full_at_8, count_max=20) for pool, s in (("a", 0.0), ("b", 1.0))]
    request = a_request(*pools, lengths=NO_SPREAD, past_lengths=(long_and_short,))
    found = [estimated(request, 2, late).rollout_s for late in range(9)]
    assert found[2] < found[0], found
    assert max(found) == found[0], found


def test_lengths_are_those_of_the_last_iterations_if_there_are_any():
    """128 responses on two members of 64."""
    request = a_request(a_pool(), lengths=NO_SPREAD)
    twice = replace(request, past_lengths=(np.full((32, 4), 800.0),))
    assert estimated(twice, 2).rollout_s == pytest.approx(30.0 + member_time_s([800.0] * 64, CURVE, 64))
    # Of several iterations the mean: as if all were of 600 tokens.
    both = replace(request, past_lengths=(*twice.past_lengths, np.full((32, 4), 400.0)))
    assert estimated(both, 2).rollout_s == pytest.approx(30.0 + member_time_s([600.0] * 64, CURVE, 64))


def test_members_keep_what_they_were_dealt_unless_it_waits():
    """Every second group is long, so that one of two members is dealt all long ones."""
    seen = np.full((32, 4), 100.0)
    seen[::2] = 1000.0
    request = a_request(a_pool(), lengths=NO_SPREAD, past_lengths=(seen,))
    assert estimated(request, 2).rollout_s == pytest.approx(30.0 + member_time_s([1000.0] * 64, CURVE, 64), rel=0.01)
    evenly_s = 30.0 + member_time_s([1000.0] * 32 + [100.0] * 32, CURVE, 64)
    known = replace(request, lengths=replace(NO_SPREAD, predictor="history"))
    assert estimated(known, 2).rollout_s == pytest.approx(evenly_s, rel=0.01)
    # As many long ones for both.
    assert estimated(replace(request, past_lengths=(np.sort(seen, axis=0),)), 2).rollout_s == pytest.approx(
        evenly_s, rel=0.01
    )
    # What waits is taken by the member with short ones.
    waiting = replace(request, pools=(a_pool(responses_max=16),))
    longest_s = member_time_s([1000.0] * 64, CURVE, 16)
    assert estimated(waiting, 2).rollout_s - 30.0 < 0.85 * longest_s


def test_members_share_evenly_what_the_engines_leave_behind():
    """Two engines decode 16 responses each for a second. Four members prefill 8 each, and then decode them."""
    lengths = GroupLengths("none", np.full(8, 400.0), np.full(8, 400.0))
    rising = StepTime(((1, 0.01), (64, 0.02)))
    reserved = replace(RESERVED, step_time=rising)
    request = a_request(a_pool(start_s=1.0, step_time=rising), lengths=lengths, reserved=reserved, seeding=COLOCATED)
    request = replace(request, rules=replace(RULES, heartbeat_interval_s=0.01))
    found = estimated(request, 4, seeding=SeedingRecord(seeding_s=1.0, members=4))
    done = 1.0 / rising.step_s(16)
    prefill_s = 8 * done / rising.prefill_tokens_per_s(64)
    assert found.rollout_s == pytest.approx(1.0 + prefill_s + (400.0 - done) * rising.step_s(8), rel=0.01)


def test_the_last_members_groups_end_later_and_the_others_do_not():
    """All groups have a long response, and those of one of two members have no other."""
    seen = np.full((32, 4), 1000.0)
    seen[::2, 1:] = 100.0
    request = a_request(a_pool(), lengths=NO_SPREAD, past_lengths=(seen,), train_s=2.0)
    found = estimated(request, 2)
    assert found.rollout_s == pytest.approx(30.0 + member_time_s([1000.0] * 64, CURVE, 64), rel=1e-3)
    # If all had ended with the last, all of training would follow.
    assert 0.5 < found.iteration_s - found.rollout_s < 1.6


def test_training_waits_the_longer_the_more_a_groups_responses_have_in_common():
    lengths = np.geomspace(50.0, 5000.0, 128)
    alike, mixed = lengths.reshape(32, 4), np.random.default_rng(0).permutation(lengths).reshape(32, 4)
    request = a_request(a_pool(), lengths=NO_SPREAD, train_s=60.0)
    found = [estimated(replace(request, past_lengths=(seen,)), 4) for seen in (alike, mixed)]
    assert found[0].rollout_s == pytest.approx(found[1].rollout_s, rel=0.01)
    # The last of them has the most tokens.
    assert found[0].iteration_s > found[1].iteration_s + 2.0


def test_publishing_waits_for_the_last_group():
    plain = a_request(a_pool(), lengths=some_lengths(32), train_s=60.0, waits=waits(publish_s=0.0))
    rollout_s = estimated(plain, 4).rollout_s
    published = replace(plain, waits=waits(publish_s=55.0))
    assert estimated(plain, 4).iteration_s < rollout_s + 55.0 <= estimated(published, 4).iteration_s
    assert estimated(published, 4).iteration_s <= rollout_s + 60.0
    # What is more than training took cannot be of it.
    assert replace(plain, waits=waits(publish_s=99.0)).publish_s == 60.0


def test_training_waits_for_the_engines_and_its_order():
    lengths = some_lengths(32)
    plain = a_request(a_pool(), lengths=lengths, reserved=RESERVED, train_s=60.0)
    seeded = estimated(plain, 4, seeding=SeedingRecord(seeding_s=500.0, members=4))
    assert seeded.iteration_s >= seeded.rollout_s + 60.0
    found = {way: estimated(replace(plain, training=way), 4).iteration_s for way in ("as_ended", "in_order", "at_end")}
    assert found["as_ended"] < found["in_order"] < found["at_end"]
    assert found["at_end"] == pytest.approx(estimated(plain, 4).rollout_s + 60.0)


def test_iterations_that_overlap_take_the_longer_of_both():
    request = a_request(a_pool(), lengths=NO_SPREAD, train_s=900.0, control_s=20.0, overlaps=True)
    assert estimated(request, 2).iteration_s == pytest.approx(920.0)
    short = replace(request, train_s=1.0)
    assert estimated(short, 2).iteration_s == estimated(short, 2).rollout_s


def test_losses_take_a_share_of_the_members():
    calm, shaky = (
        a_request(a_pool(responses_max=128, losses_per_h=rate, machine_start_s=570.0), lengths=NO_SPREAD)
        for rate in (0.0, 3.0)
    )
    # 600 s of absence 3 times an hour: half of a member for every one that works.
    assert estimated(shaky, 3).rollout_s == pytest.approx(estimated(calm, 2).rollout_s, rel=0.02)


def test_members_that_leave_are_paid_for_less():
    request = a_request(a_pool(kept=False), lengths=some_lengths(64))
    leaving = replace(request, rules=replace(RULES, objective="gpu_seconds"))
    assert estimated(leaving, 4).machines_s < 0.9 * estimated(request, 4).machines_s
    assert estimated(leaving, 4).rollout_s >= estimated(request, 4).rollout_s * 0.999


def test_groups_alike_have_the_longest_response_of_so_many():
    """The more responses there are, the longer is the longest of them."""
    few, many = (a_request(a_pool(responses_max=4096), lengths=alike_lengths(groups)) for groups in (2, 256))
    slow = [estimated(request, 4).rollout_s for request in (few, many)]
    assert slow[1] > 1.5 * slow[0]
