"""Groups that are recorded apart from training are trained to the same bits, however far recording came."""

from dataclasses import replace

import pytest
import torch
from flytekit.exceptions.user import FlyteRecoverableException

from storage.clock import ManualClock, SystemClock
from storage.records import layout, records
from storage.records.hints import collected
from storage.records.records import BatchRecord
from storage.records.run import exists, lease_holder
from storage.weights import tensor_sets
from tasks.collect import collect as collect_task
from tasks.configuration.references import PlanReference
from tasks.learning.collecting import collect
from tasks.learning.journal_follower import GroupTimeout
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tests.dying_store import DiesAtWrite, Killed
from tests.small_run import (
    EXECUTION,
    Unreachable,
    commit_iteration,
    config,
    everything,
    learned,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

URL = "memory://collect"
GROUPS = 4
# The share of the groups that is recorded before the train phase.
SHARE = "tasks.configuration.run_config.PHASE_START_SHARE"


def a_run(model, **sections):
    """A store with an iteration that is rolled out and not trained, at URL."""
    store = memory_store("collect")
    plan_iteration(config(URL, model, **sections))
    roll_out(URL, 0)
    return store


def at_url(objects, writes=1 << 30):
    return memory_store("collect", DiesAtWrite("collect", objects, writes))


def collect_groups():
    collect(URL, 0, EXECUTION, SystemClock())


def batches(store):
    """What is recorded, whoever recorded it."""
    found = [records.read(store, BatchRecord, key) for key in store.list(layout.batches(0))]
    return [replace(batch, nonce="") for batch in found]


def tensors(store):
    """The digests of all tensors of the new checkpoint and the new weights."""
    prefixes = (layout.checkpoint(1), layout.weights(1))
    return [tensor_sets.read_manifest(store, prefix).tensors for prefix in prefixes]


def groups_in(found):
    return len({graded.response // 3 for batch in found for graded in batch.graded})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A whole model directory, unlike that of this folder's other tests."""
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["plan", "arrival"])
def order(request):
    return {"micro_batch_order": request.param}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
def test_training_on_what_was_recorded_before_gives_the_same_bits(model, share, order, monkeypatch):
    monkeypatch.setattr(SHARE, share)
    trainer = {"placement": "pod"}
    begun = everything(a_run(model, algorithm=order, trainer=trainer))
    undivided = at_url(begun)
    expected = train_small(URL, 0)
    divided = at_url(begun)
    torch.manual_seed(1)
    collect_groups()
    before = batches(divided)
    assert share * GROUPS <= groups_in(before)
    assert exists(divided, layout.closed(0)) == (groups_in(before) == GROUPS)
    record = train_small(URL, 0)
    assert batches(divided)[: len(before)] == before
    assert batches(divided) == batches(undivided)
    assert learned(record.metrics) == learned(expected.metrics)
    assert tensors(divided) == tensors(undivided)


@pytest.mark.slow
def test_it_ends_when_the_share_is_recorded_and_the_trainer_records_the_rest(model, monkeypatch):
    monkeypatch.setattr(SHARE, 0.5)
    trainer = {"placement": "pod", "micro_batch_tokens_max": 1}
    store = a_run(model, trainer=trainer)
    collect_groups()
    assert groups_in(batches(store)) == GROUPS / 2
    train_small(URL, 0)
    assert groups_in(batches(store)) == GROUPS


@pytest.mark.slow
def test_where_groups_are_filtered_the_iteration_is_closed_when_enough_are_recorded(model):
    """A trainer whose pod waits for a machine could not close it, and members would generate the rest in vain."""
    trainer = {"placement": "pod", "micro_batch_tokens_max": 1}
    store = a_run(model, trainer=trainer, algorithm={"filter_groups": True, "filter_groups_budget": 2.0})
    collect_groups()
    trained = {graded.response // 3 for batch in batches(store) for graded in batch.responses}
    assert len(trained) <= GROUPS
    assert exists(store, layout.closed(0))
    assert not exists(store, layout.manifest(layout.weights(1)))


@pytest.mark.slow
def test_a_collector_that_is_killed_anywhere_is_taken_up_by_the_next(model, monkeypatch):
    monkeypatch.setattr(SHARE, 1.0)
    trainer = {"placement": "pod", "micro_batch_tokens_max": 1}
    begun = everything(a_run(model, trainer=trainer))
    undisturbed = at_url(begun)
    collect_groups()
    expected = batches(undisturbed)
    created = len(everything(undisturbed)) - len(begun)
    assert created == GROUPS + 2  # and closed.json and collected.json
    for writes in range(created):
        store = at_url(begun, writes)
        with pytest.raises(Killed):
            collect_groups()
        store.left = 1 << 30
        collect_groups()
        assert batches(store) == expected
        assert exists(store, layout.closed(0))
        spent = collected(store, 0)
        # An attempt that records nothing reads all that is recorded.
        assert spent.seconds > 0
        assert spent.puts + spent.gets >= GROUPS


@pytest.mark.slow
def test_an_execution_that_takes_over_while_the_trainers_pod_is_queued_changes_no_byte(model, monkeypatch):
    """No process keeps the lease then (decision 16)."""
    monkeypatch.setattr(SHARE, 1.0)
    settings = {"trainer": {"placement": "pod"}}
    begun = everything(a_run(model, **settings))
    undisturbed = at_url(begun)
    collect_groups()
    train_small(URL, 0)
    expected = tensors(undisturbed)
    store = at_url(begun)
    collect_groups()
    prepare(config(URL, model, **settings), "another", ManualClock())
    assert lease_holder(store) == "another"
    collect(URL, 0, "another", SystemClock())
    train_small(URL, 0)
    after = everything(store)
    train_iteration(URL, 0, "another", SystemClock())
    assert {key for key, body in everything(store).items() if after.get(key) != body} <= {layout.LEASE_BEAT}
    assert tensors(store) == expected


@pytest.mark.slow
def test_what_it_took_is_in_the_iterations_costs(model):
    store = a_run(model, trainer={"placement": "pod"})
    collect_groups()
    spent = collected(store, 0)
    assert spent.seconds > 0
    assert spent.puts >= len(batches(store)) + 1
    # The plan, the configuration, and at least a shard of each group.
    assert spent.gets >= GROUPS + 2
    train_small(URL, 0)
    metrics = commit_iteration(URL, 0).metrics
    assert metrics["timing_s/collect"] == spent.seconds
    # Another attempt finds nothing to do, and changes no figure.
    collect_groups()
    assert collected(store, 0) == spent


@pytest.mark.slow
def test_without_it_no_figure_is_told(model):
    store = a_run(model)
    train_small(URL, 0)
    assert collected(store, 0) is None
    assert "timing_s/collect" not in commit_iteration(URL, 0).metrics


def test_a_crew_that_never_comes_ends_it_by_name(model):
    memory_store("collect")
    plan_iteration(config(URL, model, trainer={"placement": "pod", "group_timeout_s": 0.05}))
    with pytest.raises(GroupTimeout, match="not claimed"):
        collect_groups()


@pytest.mark.slow
def test_the_task_hands_the_plan_on_and_a_silent_store_is_worth_another_attempt(model):
    store = a_run(model, trainer={"placement": "pod"})
    plan = PlanReference(run_url=URL, iteration=0, weight_version=0, execution=EXECUTION)
    assert collect_task(plan=plan) == plan
    assert batches(store)
    memory_store("collect", Unreachable())
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        collect_task(plan=plan)
