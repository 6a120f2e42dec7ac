"""Planning an iteration: what is written, once, by whom, and what a later attempt or another execution finds."""

import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from storage.clock import ManualClock
from storage.process_identity import process_name
from storage.records import layout, prompt_table, records
from storage.records.records import PlanRecord, ReportRecord
from storage.records.run import RunBusy, lease_holder, read_plan, read_run, release_lease
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing
from storage.weights import tensor_sets
from tasks.configuration.run_config import dump, identity, parse
from tasks.plan import execution_name, plan
from tasks.preparing.iteration import prepare
from tasks.prompts.order import prompt_index
from tests.committed_runs import publish_state
from tests.small_run import (
    Unreachable,
    config,
    document,
    everything,
    memory_store,
    plan_iteration,
)

URL = "memory://plan"


@pytest.fixture
def store():
    return memory_store("plan")


@pytest.fixture
def settings(model):
    return config(URL, model)


def commit_report(store, iteration, next_prompt):
    """As if the iteration had been rolled out, trained and concluded."""
    publish_state(store, layout.checkpoint(iteration + 1), iteration + 1)
    report = ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=next_prompt,
        metrics={"cost/usd_run": 0.0},
        rewards=(),
        lengths=(),
        lives=(),
        train_started_at_s=0,
        train_ended_at_s=0,
        created_at_s=0,
    )
    records.commit(store, layout.report(iteration), report)


def prompts_of(store, iteration):
    key = read_plan(store, iteration).prompts_key
    return prompt_table.decode_prompts(key, store.get(key))


def test_a_new_run_holds_its_identity_its_model_and_its_first_plan(store, settings):
    reference, slots = prepare(settings, "e1", ManualClock(50.0))
    assert (reference.run_url, reference.iteration, reference.weight_version) == (URL, 0, 0)
    assert (reference.execution, slots) == ("e1", [[0, 1]])
    run = read_run(store)
    assert parse(run.config) == settings
    assert (run.vocab_size, run.created_at_s) == (96, 50.0)
    assert tensor_sets.read_manifest(store, layout.weights(0)).metadata["source"].startswith("model")
    assert {key for key in store.list(layout.MODEL) if "config.json" in key or "tokenizer" in key}
    written = read_plan(store, 0)
    assert (written.run_seed, written.num_generations, written.first_prompt) == (3, 3, 0)
    assert [slot.groups for slot in written.slots] == [(0, 2), (1, 3)]
    assert (written.sampling.max_completion_length, written.sampling.stop_token_ids) == (40, (2,))
    assert parse(written.config) == settings
    rows = prompts_of(store, 0)
    assert [row.prompt_id for row in rows] == [str(prompt_index(k, 10, 0, shuffle=True)[1]) for k in range(4)]
    assert store.list(layout.PROBE) == []


def test_planning_again_finds_the_plan_that_is_there(store, settings):
    first = prepare(settings, "e1", ManualClock(1.0))
    before = everything(store)
    assert prepare(settings, "e1", ManualClock(2.0)) == first
    assert everything(store) == before


@pytest.mark.slow
def test_the_next_iteration_goes_on_where_the_prompts_of_the_last_ended(store, settings):
    plan_iteration(settings)
    commit_report(store, 0, next_prompt=4)
    reference = plan_iteration(settings)
    assert (reference.iteration, reference.weight_version) == (1, 1)
    commit_report(store, 1, next_prompt=8)
    plan_iteration(settings)
    drawn = [row.prompt_id for iteration in range(3) for row in prompts_of(store, iteration)]
    assert sorted(drawn[:10]) == sorted(str(k) for k in range(10))  # an epoch, and the beginning of the next
    assert [read_plan(store, k).first_prompt for k in range(3)] == [0, 4, 8]


def test_what_is_operational_may_change_between_iterations_and_is_recorded_in_the_plan(store, settings, model):
    plan_iteration(settings)
    commit_report(store, 0, next_prompt=4)
    wider = config(
        URL,
        model,
        pools={"rollout": {"count": 3}},
        rollout={"engine": "scripted", "flush_interval_s": 1.0},
        trainer={"micro_batch_tokens_max": 99},
    )
    assert identity(wider) == identity(settings)
    plan_iteration(wider)
    assert [slot.groups for slot in read_plan(store, 1).slots] == [(0, 3), (1,), (2,)]
    assert parse(read_plan(store, 1).config) == wider
    assert parse(read_run(store).config) == settings


def test_once_a_run_has_begun_it_needs_its_model_path_no_more(store, model, tmp_path):
    directory = shutil.copytree(model, tmp_path / "model")
    settings = config(URL, directory)
    plan_iteration(settings)
    shutil.rmtree(directory)
    commit_report(store, 0, next_prompt=4)
    assert plan_iteration(settings).iteration == 1
    assert read_plan(store, 1).sampling == read_plan(store, 0).sampling


def test_slots_without_a_group_are_not_started(store, model):
    _, slots = prepare(config(URL, model, pools={"rollout": {"count": 9}}), "e1", ManualClock())
    assert slots == [[0, 1, 2, 3]]
    assert len(read_plan(store, 0).slots) == 9


def test_a_pool_with_no_members_is_left_out_and_the_trainers_machines_generate_all(store, model):
    alone = {"pools": {"rollout": {"count": 0, "count_min": 0}}, "planning": {"seeding": "auto"}}
    reference, slots = prepare(config(URL, model, **alone), "e1", ManualClock())
    assert slots == [[]]
    planned = read_plan(store, reference.iteration).slots
    assert {slot.pool for slot in planned} == {"train"}
    assert sum(len(slot.groups) for slot in planned) > 0


def test_where_the_workflow_has_machines_of_one_pool_only_all_slots_are_on_it(store, model):
    settings = config(URL, model, pools={"more_rollout": {"far": {"count": 1}}})
    _, slots = prepare(settings, "e1", ManualClock())
    assert slots == [[0, 1], [2]]
    assert prepare(settings, "e1", ManualClock(), pools=["rollout"])[1] == [[0, 1, 2]]


class Killed(BaseException):
    """SIGKILL: nothing of the victim runs afterwards."""


class DiesAtWrite(MemoryStore):
    left = 1 << 30

    def create(self, key, body):
        self._count(key)
        return super().create(key, body)

    def put(self, key, body):
        self._count(key)
        super().put(key, body)

    def _count(self, key):
        if "probe/" in key:
            return
        if self.left == 0:
            raise Killed
        self.left -= 1


@pytest.mark.slow
def test_killed_at_any_write_the_next_attempt_writes_the_same_plan(settings):
    undisturbed = DiesAtWrite("plan")
    memory_store("plan", undisturbed)
    plan_iteration(settings)
    expected = everything(undisturbed)
    writes = (1 << 30) - undisturbed.left
    assert writes >= 8
    for number in range(writes):
        store = memory_store("plan", DiesAtWrite("plan"))
        store.left = number
        with pytest.raises(Killed):
            plan_iteration(settings)
        store.left = 1 << 30
        plan_iteration(settings)
        assert replace(read_plan(store, 0), nonce="") == replace(read_plan(undisturbed, 0), nonce="")
        assert everything(store).keys() | {layout.LEASE_BEAT} == expected.keys()
        content_named = [key for key in expected if key.startswith((layout.MODEL, layout.WEIGHTS)) or "prompts-" in key]
        assert all(store.get(key) == expected[key] for key in content_named)


def test_of_two_planners_at_once_one_plan_counts_for_both(settings, model):
    """The other was faster, and planned for another number of slots."""

    class OtherIsFirst(MemoryStore):
        def create(self, key, body):
            if key == layout.plan(0):
                other = records.decode(PlanRecord, key, body)
                records.put(self, key, replace(other, slots=other.slots[:1], nonce="other"))
            return super().create(key, body)

    store = memory_store("plan", OtherIsFirst("plan"))
    _, slots = prepare(settings, "e1", ManualClock())
    assert slots == [[0]]
    assert read_plan(store, 0).nonce == "other"


def test_another_execution_is_kept_out_and_plans_nothing(settings):
    store = memory_store("plan")
    prepare(settings, "e1", ManualClock())
    commit_report(store, 0, next_prompt=4)
    before = everything(store)

    class Beating(ManualClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            store.put(layout.LEASE_BEAT, str(self.wall()).encode())

    with pytest.raises(RunBusy, match="is being advanced by execution 'e1'; try again when it has ended"):
        prepare(settings, "e2", Beating())
    assert {k: v for k, v in everything(store).items() if k != layout.LEASE_BEAT} == {
        k: v for k, v in before.items() if k != layout.LEASE_BEAT
    }
    release_lease(store, "e1")
    reference, _ = prepare(settings, "e2", Beating())
    assert (reference.iteration, reference.execution) == (1, "e2")


@pytest.mark.parametrize("is_concluded", [False, True])
def test_an_attempt_that_finds_its_state_swept_keeps_the_lease_of_the_one_that_went_on(settings, is_concluded):
    class Swept(MemoryStore):
        """The state from which iteration 1 begins is missing; perhaps that one was concluded at this moment."""

        def get(self, key, start=0, end=None):
            if key == layout.manifest(layout.checkpoint(1)):
                if is_concluded:
                    commit_report(self, 1, next_prompt=8)
                raise ObjectMissing(key)
            return super().get(key, start, end)

    store = memory_store("plan", Swept("plan"))
    prepare(settings, "e1", ManualClock())
    commit_report(store, 0, next_prompt=4)
    with pytest.raises(ObjectMissing):
        prepare(settings, "e1", ManualClock())
    assert lease_holder(store) == ("e1" if is_concluded else None)


def test_a_holder_of_this_machine_that_has_ended_is_succeeded_at_once(store, settings):
    with living_process() as name:
        pass
    prepare(settings, name, ManualClock())
    clock = ManualClock()
    prepare(settings, "e2", clock)
    assert clock.monotonic() == 0


def test_a_holder_that_lives_on_this_machine_is_not_waited_for(store, settings):
    with living_process() as name:
        prepare(settings, name, ManualClock())
        clock = ManualClock()
        number = name.split(":")[2]
        with pytest.raises(RunBusy, match=f"^memory://plan is being advanced by process {number} of this machine;"):
            prepare(settings, "e2", clock)
    assert clock.monotonic() == 0
    prepare(settings, "e2", clock)
    assert clock.monotonic() == 0


@contextmanager
def living_process():
    told = subprocess.Popen(
        [sys.executable, "-c", "from storage.process_identity import *; print(process_name(), flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with told:
        yield told.stdout.readline().strip()
        told.communicate("\n")


def test_a_local_execution_is_named_by_its_process():
    assert execution_name() == process_name()


def test_the_task_takes_a_configuration_as_flyte_hands_it_over(store, model):
    reference, slots, to_train, _, *evaluated = plan(config=document(URL, model), after=-1, pools=["rollout"])
    assert (to_train, evaluated) == (reference, [[], []])
    assert (reference.iteration, reference.execution, slots) == (0, execution_name(), [[0, 1]])
    assert dump(config(URL, model)) == read_run(store).config


def test_a_store_that_does_not_answer_is_worth_another_attempt(model):
    memory_store("plan", Unreachable())
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        plan(config=document(URL, model), after=-1, pools=["rollout"])
