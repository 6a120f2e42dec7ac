"""The rollout task as Flyte calls it, and the process that is told to go."""

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from resources.notice import EXIT_CODE
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.failures import slot_failures
from storage.stores.connect import connect
from tasks.configuration.references import PlanReference
from tasks.rollout import rollout
from tasks.sampling.engines.engine import EngineDied, EngineError
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tests.forked import ForkedScript
from tests.small_run import (
    Unreachable,
    config,
    memory_store,
    plan_iteration,
)

URL = "memory://rollout-task"

# The notice is given once the slot has said that it works, which is before its first token.
TOLD_TO_GO = """
import os, signal, sys, threading, time
from storage.records import layout
from storage.stores.connect import connect
from tasks.configuration.references import PlanReference
from tasks.rollout import rollout

url = sys.argv[1]

def tell():
    while not any(b'"working"' in connect(url).get(key) for key in connect(url).list(layout.alive_all(0))):
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=tell, daemon=True).start()
rollout(slot=0, plan=PlanReference(run_url=url, iteration=0, weight_version=0, execution="e"))
print("it was not told in time")
"""


def test_the_task_generates_its_slot_and_says_what_it_did(model):
    store = memory_store("rollout-task")
    reference = plan_iteration(config(URL, model))
    outcome = rollout(slot=1, plan=reference)
    alive = records.read(store, HeartbeatRecord, layout.alive(0, outcome.incarnation))
    assert (outcome.slot, alive.slot, alive.state) == (1, 1, "gone")
    assert outcome.responses_finished == 6
    assert (outcome.tokens_generated, outcome.tokens_recovered) == (alive.tokens_generated, 0)
    again = rollout(slot=1, plan=reference)
    assert (again.tokens_generated, again.tokens_recovered) == (0, outcome.tokens_generated)


@pytest.mark.slow
def test_told_to_go_it_flushes_and_exits_with_the_code_that_flyte_retries(model, tmp_path):
    url = str(tmp_path / "run")
    slow = {"engine": "torch", "device": "cpu", "max_responses_in_flight": 1, "flush_interval_s": 60.0}
    run = {"url": url, "seed": 3, "num_prompts_per_step": 4, "num_generations": 4}
    settings = config(url, model, run=run, rollout=slow, sampling={"max_completion_length": 200})
    reference = plan_iteration(settings)
    (tmp_path / "told.py").write_text(TOLD_TO_GO)
    done = ForkedScript(tmp_path / "told.py", url)
    output = done.communicate(timeout=600)
    assert done.returncode == EXIT_CODE == 137, output
    store = connect(url)
    [key] = store.list(layout.alive_all(0))
    victim = records.read(store, HeartbeatRecord, key)
    assert victim.state == "gone"
    outcome = rollout(slot=0, plan=reference)
    assert outcome.tokens_recovered == victim.tokens_generated
    assert outcome.responses_finished + victim.responses_finished == 8


def test_a_plan_that_is_not_there_is_named():
    memory_store("rollout-task")
    reference = PlanReference(run_url=URL, iteration=3, weight_version=3, execution="e")
    with pytest.raises(EngineError, match="does not see iteration 3 of the run at memory://rollout-task"):
        rollout(slot=0, plan=reference)


def test_an_engine_that_dies_again_and_again_is_worth_another_attempt_elsewhere(model, monkeypatch):
    store = memory_store("rollout-task")
    reference = plan_iteration(config(URL, model))
    monkeypatch.setattr("tasks.sampling.session.member.ENGINE_RESTARTS_MAX", 1)
    step, steps = ScriptedEngine.step, []

    def dies(engine):
        steps.append(engine)
        if len(steps) > 5:
            raise EngineDied("CUDA error: unspecified launch failure")
        return step(engine)

    monkeypatch.setattr(ScriptedEngine, "step", dies)
    with pytest.raises(FlyteRecoverableException, match=r"1 of 1 restarts tried: CUDA error: unspecified launch"):
        rollout(slot=0, plan=reference)
    monkeypatch.undo()
    [victim] = [records.read(store, HeartbeatRecord, key) for key in store.list(layout.alive_all(0))]
    assert (victim.state, len(steps)) == ("gone", 7)
    assert rollout(slot=0, plan=reference).tokens_recovered == victim.tokens_generated > 0


def test_an_engine_that_cannot_do_it_anywhere_fails_at_once(model, monkeypatch):
    memory_store("rollout-task")
    reference = plan_iteration(config(URL, model))

    def refuses(engine):
        raise EngineError("log-prob nan at token 3; weights bad?")

    monkeypatch.setattr(ScriptedEngine, "step", refuses)
    with pytest.raises(EngineError, match="weights bad"):
        rollout(slot=0, plan=reference)


def test_the_task_is_interruptible_and_has_retries():
    assert rollout.metadata.interruptible
    assert rollout.metadata.retries >= 1
    assert rollout.pod_template.pod_spec.termination_grace_period_seconds >= 30


def test_a_store_that_does_not_answer_is_worth_another_attempt():
    memory_store("rollout-task", Unreachable())
    reference = PlanReference(run_url=URL, iteration=0, weight_version=0, execution="e")
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        rollout(slot=0, plan=reference)


def test_why_an_attempt_failed_is_noted_in_the_run(model, monkeypatch):
    store = memory_store("rollout-task")
    reference = plan_iteration(config(URL, model))

    def refuses(engine):
        raise EngineError("vLLM is not installed")

    monkeypatch.setattr(ScriptedEngine, "step", refuses)
    for _ in range(2):
        with pytest.raises(EngineError):
            rollout(slot=1, plan=reference)
    [told] = slot_failures(store, 0, reference.execution).values()
    assert (told.slot, told.error) == (1, "EngineError: vLLM is not installed")
    assert slot_failures(store, 0, "another execution") == {}


def test_a_machine_that_does_not_see_the_run_writes_nothing_where_it_looks():
    """An image that points to another bucket must not begin a run there."""
    store = memory_store("rollout-task")
    with pytest.raises(EngineError):
        rollout(slot=0, plan=PlanReference(run_url=URL, iteration=3, weight_version=3, execution="e"))
    assert store.list("") == []


def test_a_failure_that_cannot_be_noted_is_raised_all_the_same(caplog):
    memory_store("rollout-task", Unreachable())
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        rollout(slot=0, plan=PlanReference(run_url=URL, iteration=0, weight_version=0, execution="e"))
    assert "the failure is not kept in the run: no answer" in caplog.text
