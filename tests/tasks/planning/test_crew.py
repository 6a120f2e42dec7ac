"""What a crew is expected to take and to cost, against sums made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from storage.planning_records import SeedingRecord
from storage.records import TRAIN_POOL
from tasks.planning.crew import engines_in_members, planned_crew
from tasks.planning.division import assign_groups
from tasks.planning.makespan import member_time_s, response_lengths
from tasks.planning.offer import GroupLengths, ReservedOffer
from tasks.planning.step_time import NOMINAL
from tests.planning_requests import CURVE, a_request, alike_lengths, an_offer, waits

RESERVED = ReservedOffer(engines=2, usd_per_h=16.0, responses_max=64, step_time=CURVE)


def test_a_member_is_paid_for_from_being_asked_for_until_its_work_has_ended():
    request = a_request(an_offer(count_max=2, start_s=36.0), settings={"dispatch": "in_turn"})
    crew = planned_crew(request, (2,))
    responses = response_lengths(request.lengths, 4)
    ends = [36.0 + member_time_s(responses[k::2].ravel(), CURVE, 64) for k in range(2)]
    assert crew.rollout_s == pytest.approx(max(ends))
    assert crew.machines_s == pytest.approx(sum(ends))
    assert crew.usd_rollout == crew.usd_iteration == pytest.approx(sum(ends) * 2.0 / 3600)


def test_losses_cost_a_start_and_the_prefixes_again():
    """3.6 losses an hour are one in 1,000 seconds; of each of 16 responses half a mean length is prefilled anew."""
    steady = a_request(an_offer(count_max=1), groups=4, lengths=alike_lengths(4))
    shaky = a_request(an_offer(count_max=1, losses_per_h=3.6), groups=4, lengths=alike_lengths(4))
    calm_s, lost_s = (planned_crew(request, (1,)).rollout_s for request in (steady, shaky))
    again_s = 30.0 + 16 * 200 / CURVE.tokens_per_s(64)
    assert lost_s - calm_s == pytest.approx((calm_s - 30.0) / 1000 * again_s)


def test_the_trainers_machines_are_paid_for_until_the_later_of_both_ends():
    offer = an_offer(count_max=2, usd_per_h=0.0)
    before = SeedingRecord(seeding_s=20.0, members=2, memory={"2": 20.0})
    request = a_request(offer, reserved=RESERVED, seeding=before, settings={"seeding": "auto"}, train_s=1000.0)
    assert planned_crew(request, (2,)).usd_iteration == pytest.approx(1020 * 16 / 3600)
    generating = planned_crew(replace(request, train_s=0.001), (2,))
    assert generating.usd_iteration == pytest.approx(generating.rollout_s * 16 / 3600)
    alone = planned_crew(request, (0,))
    assert alone.usd_iteration == pytest.approx((alone.rollout_s + 1000) * 16 / 3600)


def test_the_trainers_engines_are_members_while_they_generate():
    request = a_request(
        an_offer(count_max=2), reserved=RESERVED, settings={"seeding": "auto", "seeding_s_initial": 9.0}
    )
    crew = planned_crew(request, (2,))
    assert [member.pool for member in crew.members] == ["rollout", "rollout", TRAIN_POOL, TRAIN_POOL]
    assert [member.window_s for member in crew.members] == [None, None, 9.0, 9.0]
    assert crew.seeding == SeedingRecord(seeding_s=9.0, members=2)
    off = planned_crew(a_request(an_offer(count_max=2), reserved=RESERVED), (2,))
    assert off.seeding is None
    assert len(off.members) == 2
    colocated = planned_crew(a_request(an_offer(count_max=2), reserved=RESERVED), (0,))
    assert colocated.seeding == SeedingRecord(seeding_s=None, members=0)
    assert [member.window_s for member in colocated.members] == [None, None]


def test_with_enough_members_the_trainer_generates_nothing():
    request = a_request(
        an_offer(count_max=2),
        reserved=RESERVED,
        settings={"seeding": "auto"},
        seeding=SeedingRecord(seeding_s=5.0, members=2),
        waits=waits(rollout_s=100.0, members=2.0, members_at_end=2),
        train_s=500.0,
    )
    crew = planned_crew(request, (2,))
    assert crew.seeding is not None
    assert crew.seeding.seeding_s == 0.0
    assert len(crew.members) == len(crew.assignments) == 2


def test_who_was_not_measured_counts_as_one_who_was():
    slow = CURVE.scaled(3.0)
    request = a_request(an_offer("rollout", step_time=NOMINAL), an_offer("spot", step_time=slow), reserved=RESERVED)
    assert {member.step_time for member in planned_crew(request, (2, 2)).members} == {slow}
    assert {member.step_time for member in planned_crew(request, (0, 0)).members} == {CURVE}


@pytest.mark.parametrize("settings", [{"dispatch": "in_turn"}, {}])
def test_groups_are_dealt_in_turn_where_nothing_tells_them_apart(settings):
    request = a_request(an_offer(), an_offer("spot", usd_per_h=9.0), groups=11, lengths=alike_lengths(11))
    crew = planned_crew(request, (2, 3))
    assert tuple(a.groups for a in crew.assignments) == assign_groups(11, 5)
    assert all(a.batch_max is None for a in crew.assignments)


def test_a_member_further_away_gets_less_of_what_is_long():
    lengths = GroupLengths("history", np.array([900.0, 100.0]), np.array([1000.0, 120.0]))
    offers = an_offer("far", start_s=35.0), an_offer("rollout")
    for objective in ("makespan", "gpu_seconds"):
        request = a_request(*offers, lengths=lengths, settings={"objective": objective})
        crew = planned_crew(request, (1, 1))
        held = dict(zip(("far", "rollout"), crew.assignments, strict=True))
        assert 0 in held["rollout"].groups


def test_an_engine_counts_as_so_many_members_as_it_is_faster():
    """R = 200 s of 2 members; an engine does the work of two, so that it seeds half as long as one like a member."""
    past = {
        "settings": {"seeding": "auto", "seeding_s_min": 0.0},
        "seeding": SeedingRecord(seeding_s=150.0, members=2),
        "waits": waits(rollout_s=100.0, members=2.0, members_at_end=2),
        "train_s": 10.0,
    }
    offer = an_offer(count_max=2, start_s=0.0)
    one, fast = ReservedOffer(engines=1, usd_per_h=8.0, responses_max=64, step_time=CURVE), CURVE.scaled(0.5)
    alike = a_request(offer, reserved=one, **past)
    faster = a_request(offer, reserved=replace(one, step_time=fast), **past)
    assert [engines_in_members(request) for request in (alike, faster)] == [1.0, pytest.approx(2.0)]
    # The trainer generated as long as the crew did, whatever was planned: 100 s.
    seconds = [planned_crew(request, (2,)).seeding.seeding_s for request in (alike, faster)]
    assert seconds == pytest.approx([(300 - 2 * 10) / 3, (400 - 2 * 10) / 4])


def test_what_is_no_machines_is_paid_for_too():
    plain = a_request(an_offer(), reserved=RESERVED)
    asked = replace(plain, usd_no_machine=0.25)
    assert planned_crew(asked, (2,)).usd_iteration == pytest.approx(planned_crew(plain, (2,)).usd_iteration + 0.25)
    no_trainer = a_request(an_offer(), usd_no_machine=0.25)
    crew = planned_crew(no_trainer, (2,))
    assert crew.usd_iteration == pytest.approx(crew.usd_rollout + 0.25)
