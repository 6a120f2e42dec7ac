"""The standing task as Flyte calls it."""

import threading

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from resources import work_log
from storage.clock import SystemClock
from storage.records import layout, records
from storage.records.failures import slot_failures
from storage.records.records import ClosedRecord
from storage.records.run import release_lease
from tasks.preparing.iteration import prepare
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.stand import stand
from tests.small_run import EXECUTION, config, everything, memory_store, plan_iteration

URL = "memory://stand-task"
STANDING = {"crew": "standing"}


@pytest.fixture
def store(model):
    return memory_store("stand-task")


def close(store, iteration):
    records.commit(store, layout.closed(iteration), ClosedRecord(iteration=iteration, reason="trained"))


def test_it_leaves_when_the_last_iteration_of_its_execution_is_closed(store, model):
    reference = plan_iteration(config(URL, model, rollout=STANDING))
    close(store, 0)
    before = everything(store)
    outcome = stand(slot=1, plan=reference, iterations=1)
    assert (outcome.slot, outcome.responses_finished) == (1, 0)
    assert everything(store) == before


def test_it_leaves_when_the_execution_has_ended_before_its_last_iteration(store, model):
    reference = plan_iteration(config(URL, model, rollout=STANDING))
    close(store, 0)
    release_lease(store, EXECUTION)
    assert stand(slot=1, plan=reference, iterations=5).responses_finished == 0


@pytest.mark.slow
def test_a_failure_is_noted_in_the_iteration_in_which_it_happened(store, model, monkeypatch):
    settings = config(URL, model, rollout=STANDING, algorithm={"max_staleness": 1})
    reference = plan_iteration(settings)
    prepare(settings, EXECUTION, SystemClock(), ahead=1)
    close(store, 0)

    def dies(engine):
        raise EngineDied("CUDA error: unspecified launch failure")

    monkeypatch.setattr(ScriptedEngine, "step", dies)
    monkeypatch.setattr("tasks.sampling.session.member.ENGINE_RESTARTS_MAX", 0)
    with pytest.raises(FlyteRecoverableException, match="CUDA error"):
        stand(slot=0, plan=reference, iterations=3)
    assert not slot_failures(store, 0, EXECUTION)
    [told] = slot_failures(store, 1, EXECUTION).values()
    assert (told.slot, told.iteration) == (0, 1)


def test_its_pod_says_for_whom_it_stands_how_far_it_is_and_what_it_waits_for(store, model, monkeypatch, capsys):
    """The last iteration of the execution is closed while the member looks for more responses."""
    reference = plan_iteration(config(URL, model, rollout=STANDING))
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")
    monkeypatch.setattr(work_log, "INTERVAL_S", 0.02)
    closing = threading.Timer(1.0, lambda: (close(store, 0), release_lease(store, EXECUTION)))
    closing.start()
    outcome = stand(slot=1, plan=reference, iterations=2)
    closing.join()
    place = f"run {URL}, iteration 0, slot 1, standing crew: "
    said = [line.split(place)[1] for line in capsys.readouterr().err.splitlines() if place in line]
    assert said[0].startswith("begins, granted ")
    assert "starting the engine" in said
    assert any(line.startswith("generating for iteration 0 as 00001-") for line in said)
    done = f"{outcome.responses_finished} responses ended, {outcome.tokens_generated} tokens generated"
    assert any(f": {done}; waits for responses that it can take" in line for line in said)
    assert said[-1].startswith(f"ends: {done}, after ")
