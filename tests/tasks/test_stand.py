"""The standing task as Flyte calls it."""

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from storage import layout, records
from storage.clock import SystemClock
from storage.failures import slot_failures
from storage.records import ClosedRecord
from storage.run import release_lease
from tasks.preparing.iteration import prepare
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.stand import stand
from tests.small_run import EXECUTION, config, everything, memory_store, plan_iteration

URL = "memory://stand-task"
STANDING = {"crew": "standing", "engine_restarts_max": 0}


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
    with pytest.raises(FlyteRecoverableException, match="CUDA error"):
        stand(slot=0, plan=reference, iterations=3)
    assert not slot_failures(store, 0, EXECUTION)
    [told] = slot_failures(store, 1, EXECUTION).values()
    assert (told.slot, told.iteration) == (0, 1)
