"""Crews: who is in them, when each begins, and which groups each was dealt."""

from dataclasses import replace

import numpy as np
import pytest

from storage.records.planning_records import SeedingRecord
from storage.records.records import TRAIN_POOL
from tasks.crew_model.step_time import NOMINAL
from tasks.planning.capacity import GroupLengths, TrainerCapacity
from tasks.planning.division import assign_groups
from tasks.planning.makespan import member_time_s, response_lengths
from tasks.planning.planned_crew import engines_in_members, engines_stop_s, planned_crew, seedings
from tests.planning_requests import CURVE, a_pool, a_request, alike_lengths, some_lengths, waits

RESERVED = TrainerCapacity(engines=2, usd_per_h=16.0, responses_max=64, step_time=CURVE)


def crew_of(request, counts):
    """With the first seeding considered, which is what the controller says."""
    return planned_crew(request, counts, seedings(request, counts)[0])


def test_a_crew_has_ended_what_it_was_dealt_when_its_last_member_has():
    request = a_request(a_pool(count_max=2, start_s=36.0), settings={"dispatch": "in_turn"})
    responses = response_lengths(request.lengths, 4)
    ends = [36.0 + member_time_s(responses[k::2].ravel(), CURVE, 64) for k in range(2)]
    assert crew_of(request, (2,)).makespan_s == pytest.approx(max(ends))


def test_a_member_on_a_new_machine_begins_when_it_has_started_and_has_a_group_all_the_same():
    request = a_request(a_pool(machine_start_s=5000.0, machines_present=2), lengths=some_lengths(16))
    crew = crew_of(request, (4,))
    assert [member.start_s for member in crew.members] == [30.0, 30.0, 5030.0, 5030.0]
    assert [len(assignment.groups) for assignment in crew.assignments[2:]] == [1, 1]
    dealt = [group for assignment in crew.assignments for group in assignment.groups]
    assert sorted(dealt) == list(range(16))


def test_engines_go_on_until_there_is_a_member_to_hand_over_to():
    late = a_pool(count_max=2, machine_start_s=500.0, machines_present=0)
    request = a_request(late, reserved=RESERVED, settings={"seeding": "auto", "seeding_s_initial": 9.0})
    crew = crew_of(request, (2,))
    assert engines_stop_s(crew.seeding, [member.start_s for member in crew.members[:2]], 0.0) == 530.0


def test_the_trainers_engines_are_members_while_they_generate():
    request = a_request(a_pool(count_max=2), reserved=RESERVED, settings={"seeding": "auto", "seeding_s_initial": 9.0})
    crew = crew_of(request, (2,))
    assert [member.pool for member in crew.members] == ["rollout", "rollout", TRAIN_POOL, TRAIN_POOL]
    # What the engines have not ended when they stop is free for the crew, so they are dealt groups like the others.
    assert all(assignment.groups for assignment in crew.assignments)
    assert crew.seeding == SeedingRecord(seeding_s=9.0, members=2)
    off = crew_of(a_request(a_pool(count_max=2), reserved=RESERVED), (2,))
    assert off.seeding is None
    assert len(off.members) == 2
    colocated = crew_of(a_request(a_pool(count_max=2), reserved=RESERVED), (0,))
    assert colocated.seeding == SeedingRecord(seeding_s=None, members=0)


def test_with_enough_members_the_trainer_generates_nothing():
    request = a_request(
        a_pool(count_max=2),
        reserved=RESERVED,
        settings={"seeding": "auto"},
        seeding=SeedingRecord(seeding_s=5.0, members=2),
        waits=waits(rollout_s=100.0, members=2.0, members_at_end=2),
        train_s=500.0,
    )
    crew = crew_of(request, (2,))
    assert crew.seeding is not None
    assert crew.seeding.seeding_s == 0.0
    assert len(crew.members) == len(crew.assignments) == 2


def test_who_was_not_measured_counts_as_one_who_was():
    slow = CURVE.scaled(3.0)
    request = a_request(a_pool("rollout", step_time=NOMINAL), a_pool("spot", step_time=slow), reserved=RESERVED)
    assert {member.step_time for member in crew_of(request, (2, 2)).members} == {slow}
    assert {member.step_time for member in crew_of(request, (0, 0)).members} == {CURVE}


@pytest.mark.parametrize("settings", [{"dispatch": "in_turn"}, {}])
def test_groups_are_dealt_in_turn_where_nothing_tells_them_apart(settings):
    request = a_request(a_pool(), a_pool("spot", usd_per_h=9.0), groups=11, lengths=alike_lengths(11))
    crew = crew_of(request, (2, 3))
    assert tuple(a.groups for a in crew.assignments) == assign_groups(11, 5)
    assert all(a.batch_max is None for a in crew.assignments)


def test_a_member_further_away_gets_less_of_what_is_long():
    lengths = GroupLengths("history", np.array([900.0, 100.0]), np.array([1000.0, 120.0]))
    pools = a_pool("far", start_s=35.0), a_pool("rollout")
    for objective in ("makespan", "gpu_seconds"):
        request = a_request(*pools, lengths=lengths, settings={"objective": objective})
        crew = crew_of(request, (1, 1))
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
    pool = a_pool(count_max=2, start_s=0.0)
    one, fast = TrainerCapacity(engines=1, usd_per_h=8.0, responses_max=64, step_time=CURVE), CURVE.scaled(0.5)
    alike = a_request(pool, reserved=one, **past)
    faster = a_request(pool, reserved=replace(one, step_time=fast), **past)
    assert [engines_in_members(request) for request in (alike, faster)] == [1.0, pytest.approx(2.0)]
    # The trainer generated as long as the crew did, whatever was planned: 100 s.
    seconds = [crew_of(request, (2,)).seeding.seeding_s for request in (alike, faster)]
    assert seconds == pytest.approx([(300 - 2 * 10) / 3, (400 - 2 * 10) / 4])
