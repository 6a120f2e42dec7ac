"""What a simulated planner is told is what tasks.history.planning_inputs would tell a real one."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from storage.records.planning_records import SeedingRecord
from storage.records.records import TRAIN_POOL
from tasks.crew_model.accounts import PARTS
from tasks.forecasting.knowledge import Knowledge
from tasks.forecasting.results import SimulatedIteration
from tasks.forecasting.scenario import ToolsScenario
from tasks.history.planning_inputs import REPORTS_READ
from tasks.planning.capacity import GroupLengths, StepWaits
from tasks.planning.request import PlanningRequest
from tests.simulated_scenarios import a_pool, a_scenario

LENGTHS = GroupLengths("none", np.full(8, 100.0), np.full(8, 200.0))


def told(knowledge: Knowledge) -> PlanningRequest:
    return knowledge.request(LENGTHS, {"rollout": None}, {"rollout": 1}, None)


def concluded(iteration: int, losses: int, train_s: float) -> tuple[Any, ...]:
    """An hour of a crew's processes and nine of machines without any; a dollar beside machines."""
    seconds = dict.fromkeys(PARTS, 0.0) | {"useful": 3000.0, "process": 600.0, "starting": 7200.0, "standing": 25_200.0}
    usd = dict.fromkeys(PARTS, 2.0) | {"requests": 0.75, "egress": 0.25}
    waits = StepWaits(
        wait_train_s=1.0, wait_remote_s=2.0, train_s=train_s, rollout_s=50.0, members=2.0, members_at_end=2
    )
    result = SimulatedIteration(
        iteration=iteration,
        duration_s=100.0,
        rollout_s=50.0,
        train_s=train_s,
        wait_train_s=1.0,
        wait_remote_s=2.0,
        seeding_s=0.0,
        members={"rollout": 2.0},
        planned={"rollout": 2},
        members_at_end=2,
        tokens=100,
        tokens_decoded=100.0,
        tokens_regenerated=0.0,
        prefill_tokens=0.0,
        moved=0,
        losses={"rollout": losses},
        seconds={"rollout": seconds, TRAIN_POOL: dict.fromkeys(PARTS, 0.0)},
        usd={"rollout": usd},
        gpu_s=0.0,
        decisions=(),
    )
    seeding = SeedingRecord(seeding_s=float(iteration), members=2)
    return result, waits, seeding, np.full((8, 4), 100 + iteration)


def test_the_start_of_a_process_beside_a_pull_and_that_of_a_machine_are_known_apart():
    scenario = a_scenario(a_pool(2, start_s=500.0, process_s=3.0, kept=False))
    [pool] = told(Knowledge(scenario)).pools
    assert pool.start_s == pytest.approx(3.0)
    [sooner] = told(Knowledge(a_scenario(a_pool(2, process_s=0.5)))).pools
    # A gigabyte over 8 Gbit/s.
    assert sooner.start_s == pytest.approx(1.0)
    assert (pool.machine_start_s, pool.kept, pool.machines_present) == (500.0, False, 1)


def test_the_last_iterations_are_told_the_newest_first():
    knowledge = Knowledge(a_scenario(a_pool(2)))
    assert told(knowledge).past_lengths == ()
    for iteration in range(REPORTS_READ + 1):
        result, waits, seeding, lengths = concluded(iteration, losses=0, train_s=10.0)
        knowledge.learn(replace(result, control_s=4.0), waits, seeding, lengths)
    request = told(knowledge)
    assert (request.control_s, request.seeding) == (4.0, seeding)
    assert [seen[0, 0] - 100 for seen in request.past_lengths] == list(range(REPORTS_READ, 0, -1))


def test_how_training_takes_groups_is_known():
    def training(**policy: bool) -> tuple[str, bool]:
        request = told(Knowledge(a_scenario(a_pool(2), **policy)))
        return request.training, request.keep_order

    assert training() == ("as_ended", False)
    assert training(in_order=True, keep_order=True) == ("in_order", True)
    assert training(in_order=True, streaming=False) == ("at_end", False)


def test_losses_are_per_hour_of_a_machine_and_forgotten_with_their_reports():
    knowledge = Knowledge(a_scenario(a_pool(2)))
    knowledge.learn(*concluded(0, losses=8, train_s=10.0))
    # A machine may be lost while it starts or stands, too.
    assert told(knowledge).pools[0].losses_per_h == pytest.approx(0.8)
    for iteration in range(1, REPORTS_READ):
        knowledge.learn(*concluded(iteration, losses=0, train_s=10.0))
    assert told(knowledge).pools[0].losses_per_h == pytest.approx(0.8 / REPORTS_READ)
    knowledge.learn(*concluded(REPORTS_READ, losses=0, train_s=10.0))
    assert told(knowledge).pools[0].losses_per_h == 0.0


def test_training_is_the_median_and_dollars_beside_machines_those_of_the_last():
    knowledge = Knowledge(a_scenario(a_pool(2)))
    assert (told(knowledge).train_s, told(knowledge).usd_no_machine, told(knowledge).waits) == (None, 0.0, None)
    for iteration, train_s in enumerate((10.0, 30.0, 12.0)):
        knowledge.learn(*concluded(iteration, losses=0, train_s=train_s))
    request = told(knowledge)
    assert (request.train_s, request.usd_no_machine, request.width) == (12.0, 1.0, (("rollout", 2),))
    assert request.spent_usd == pytest.approx(3 * (len(PARTS) * 2.0 + 1.0))


def test_the_waiting_for_tools_is_that_of_the_last_iterations_and_at_first_that_of_the_scenario():
    scenario = a_scenario(a_pool(2))
    tools = ToolsScenario(answers=4.0, answer_s=5.0)
    knowledge = Knowledge(replace(scenario, work=replace(scenario.work, tools=tools)))
    # 20 s for each response, of which 100 tokens are expected.
    assert told(knowledge).tool_s_per_token == pytest.approx(0.2)
    for iteration, tool_s in enumerate((30.0, 10.0)):
        result, waits, seeding, lengths = concluded(iteration, losses=0, train_s=10.0)
        knowledge.learn(replace(result, tool_s=tool_s), waits, seeding, lengths)
    assert told(knowledge).tool_s_per_token == pytest.approx(40.0 / 200)
    assert told(Knowledge(scenario)).tool_s_per_token == 0.0
    untold = replace(scenario, policy=replace(scenario.policy, plans_tools=False))
    assert told(Knowledge(replace(untold, work=replace(scenario.work, tools=tools)))).tool_s_per_token == 0.0
