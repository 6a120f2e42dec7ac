"""The trainer that stands, by the command of its container: what it learns, and what becomes of it when it ends."""

import os
import signal
from contextlib import contextmanager

import pytest

from resources.notice import EXIT_CODE
from storage.clock import SystemClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_reading import FleetReader
from storage.fleet.fleet_records import DueRecord, FleetRecord
from storage.records import layout, records
from storage.records.run import exists, is_trained, release_lease
from storage.stores.connect import connect
from tasks.learning.collecting import collect_and_wait
from tasks.learning.launch import train_here
from tasks.stand_trainer import stand_trainer
from tests.processes import LIMIT_S, PID_1, container_of, first_process, wait_until
from tests.served_fleet import KEPT, in_thread, states
from tests.small_run import EXECUTION, commit_iteration, config, plan_iteration, roll_out

pytestmark = pytest.mark.slow
TTL_S = 1.5
# What is learned then depends on no time.
BY_THE_PLAN = {"old_logprobs": "trainer", "micro_batch_order": "plan"}


def a_run(tmp_path, model, placement="standing", ranks=1, **sections):
    url = str(tmp_path / placement)
    trainer = {"placement": placement, "nproc_per_node": ranks, "group_timeout_s": LIMIT_S} | sections.pop(
        "trainer", {}
    )
    given = {"trainer": trainer, "planning": {"seeding": "off"}, "algorithm": BY_THE_PLAN, **KEPT}
    return config(url, model, **{**given, **sections})


def alone(settings, iterations):
    """The states of the same run with a train task for each iteration."""
    for iteration in range(iterations):
        plan_iteration(settings, SystemClock())
        roll_out(settings.run.url, iteration)
        train_here(settings.run.url, iteration, EXECUTION, SystemClock())
        commit_iteration(settings.run.url, iteration)
    return states(settings.run.url)


@contextmanager
def life(tmp_path, plan, iterations, name):
    inputs = {"plan": plan, "iterations": iterations}
    with container_of(stand_trainer, inputs, tmp_path / name, str(tmp_path / name)) as process:
        yield process


def kill(process):
    """SIGKILL the task's process; its workers see that it is gone."""
    first = first_process(process.pid, as_pid_1=bool(PID_1))
    os.kill(first, signal.SIGKILL)
    process.wait(LIMIT_S)


def reader_of(settings):
    store = connect(fleet_layout.standing(settings.run.url))
    return FleetReader(store, records.read(store, FleetRecord, fleet_layout.FLEET))


def hosts(settings):
    return reader_of(settings).hosts()


def beat(settings):
    """The last heartbeat of the host that has the seat, or None."""
    reader = reader_of(settings)
    seat = reader.seat(fleet_layout.run_id(settings.run.url))
    return None if seat is None else reader.beat(seat.host)


def concluded(settings, iteration, wait):
    record = wait()
    commit_iteration(settings.run.url, iteration)
    return record.metrics["sharing/warm"]


def begin(settings, iteration):
    """Roll an iteration out, and begin its train task; returns the plan's reference and what waits for the task."""
    plan = plan_iteration(settings, SystemClock())
    roll_out(settings.run.url, iteration)
    # A host that was killed is forgotten in a moment.
    rules = FleetRecord(run_prefixes=(settings.run.url,), host_ttl_s=TTL_S, created_at_s=0.0)
    records.put(connect(fleet_layout.standing(settings.run.url)), fleet_layout.FLEET, rules)
    return plan, in_thread(collect_and_wait, settings.run.url, iteration, EXECUTION, SystemClock())


def test_killed_between_two_phases_and_within_one_the_next_life_goes_on_with_the_same_bits(tmp_path, model):
    gate = tmp_path / "gate"
    gate.write_text("open")
    graded = {"rewards": [{"function": "tests.reward_functions:behind_a_gate", "arguments": {"file": str(gate)}}]}
    graded["trainer"] = {"micro_batch_tokens_max": 1}
    settings, iterations, warm = a_run(tmp_path, model, **graded), 4, []
    url = settings.run.url
    plan, wait = begin(settings, 0)
    with life(tmp_path, plan, iterations, "first") as process:
        warm.append(concluded(settings, 0, wait))
        wait_until(lambda: exists(connect(url), layout.manifest(layout.checkpoint(1))))
        kill(process)
    _, wait = begin(settings, 1)
    with life(tmp_path, plan, iterations, "second") as process:
        warm.append(concluded(settings, 1, wait))
        gate.write_text("once")
        _, wait = begin(settings, 2)
        # The phase has begun with the first group, and waits for the others.
        wait_until(lambda: (beat(settings).state, beat(settings).iteration) == ("training", 2))
        assert len(connect(url).list(layout.batches(2))) == 1
        kill(process)
    gate.write_text("open")
    with life(tmp_path, plan, iterations, "third") as process:
        warm.append(concluded(settings, 2, wait))
        _, wait = begin(settings, 3)
        warm.append(concluded(settings, 3, wait))
        assert process.wait(LIMIT_S) == 0
    assert warm[3] == 1.0
    assert len(hosts(settings)) == 3
    assert beat(settings).state == "gone"
    assert states(url) == alone(a_run(tmp_path, model, "own", **graded), iterations)


def test_two_ranks_end_with_the_bits_of_two_ranks_of_their_own_and_notice_ends_them_at_once(tmp_path, model):
    settings, iterations = a_run(tmp_path, model, ranks=2), 3
    plan, wait = begin(settings, 0)
    with life(tmp_path, plan, iterations + 1, "ranks") as process:
        for iteration in range(iterations):
            assert concluded(settings, iteration, wait) == float(iteration > 0)
            if iteration + 1 < iterations:
                _, wait = begin(settings, iteration + 1)
        wait_until(lambda: exists(connect(settings.run.url), layout.manifest(layout.checkpoint(iterations))))
        os.kill(first_process(process.pid, as_pid_1=bool(PID_1)), signal.SIGTERM)
        # Flyte counts this as a lost machine, and starts the trainer again.
        assert process.wait(LIMIT_S) == EXIT_CODE
    assert beat(settings).state == "gone"
    assert states(settings.run.url) == alone(a_run(tmp_path, model, "own", ranks=2), iterations)


def test_it_ends_when_its_execution_advances_the_run_no_more_though_a_phase_waits(tmp_path, model):
    settings = a_run(tmp_path, model)
    plan = plan_iteration(settings, SystemClock())
    roll_out(settings.run.url, 0)
    records.commit(connect(settings.run.url), layout.due(0), DueRecord(iteration=0, groups=1))
    with life(tmp_path, plan, 5, "given up") as process:
        wait_until(lambda: (seen := beat(settings)) is not None and seen.state == "training")
        release_lease(connect(settings.run.url), EXECUTION)
        assert process.wait(LIMIT_S) == 0
    assert not is_trained(connect(settings.run.url), 0)
