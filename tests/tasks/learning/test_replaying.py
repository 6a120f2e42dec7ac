"""Restoring from an older checkpoint, by training what was recorded since then again: the same bits for any interval.

Whatever the interval, wherever a trainer is killed, and whether the journals are still there, checkpoints and weights
are those of a run that stores a checkpoint in each iteration.
"""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.clock import ManualClock
from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout
from storage.stores.connect import connect
from storage.stores.store import CorruptObject, ObjectMissing
from storage.weights import tensor_sets
from storage.weights.stored_versions import list_versions, restored_from
from storage.weights.versions import pull_version
from tasks.preparing.iteration import prepare
from tests.covering import covering
from tests.dying_store import DiesAtWrite, Killed
from tests.property_examples import part_of_examples
from tests.small_run import (
    EXECUTION,
    commit_iteration,
    config,
    everything,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

URL = "memory://replaying"
ITERATIONS = 4
# Adam's moments, a schedule and a penalty make each step depend on all before it.
SCHEDULE = {"learning_rate": 1e-2, "warmup_steps": 2, "schedule": "linear", "total_steps": 9, "weight_decay": 0.01}
ALGORITHMS = {
    "grpo": {},
    "importance sampling in two steps": {"algorithm": {"importance_sampling": "auto", "num_mini_batches": 2}},
    "ppo with a reference": {"algorithm": {"advantage_estimator": "gae", "kl_coef": 0.1}},
    "dynamic sampling": {"algorithm": {"filter_groups": True, "filter_groups_budget": 2.0}},
    "adapters with a reference": {"lora": {"rank": 2}, "algorithm": {"kl_coef": 0.1}},
    "adapters alone": {"lora": {"rank": 2, "publish": "adapter"}},
}
ALL = RetentionConfig(keep_weights=99, keep_checkpoints=99)
FEWEST = RetentionConfig(keep_weights=2, keep_checkpoints=1)
NEVER = 1 << 30
TWO_BATCHES = {"micro_batch_tokens_max": 640}
WEIGHTS_1 = layout.manifest(layout.weights(1))


class DiesAtRequest(DiesAtWrite):
    """Its client is also killed at a chosen request of any kind: a replay only reads."""

    def __init__(self, name):
        super().__init__(name, {})
        self.requests_left = NEVER

    def get(self, key, start=0, end=None):
        self._request()
        return super().get(key, start, end)

    def list(self, prefix, after=""):
        self._request()
        return super().list(prefix, after)

    def create(self, key, body):
        self._request()
        return super().create(key, body)

    def _request(self):
        if self.requests_left == 0:
            raise Killed
        self.requests_left -= 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


def run(model, name, interval, **trainer):
    trainer = {**TWO_BATCHES, "checkpoint_interval": interval, **trainer}
    return config(URL, model, optimizer=SCHEDULE, trainer=trainer, **ALGORITHMS[name])


def prepared(run_config, iteration):
    plan_iteration(run_config)
    roll_out(URL, iteration)


def states(store):
    """The tensors of all complete checkpoints and weights by their digests, and the trainer's state beside them."""
    found = {}
    for key in store.list(layout.CHECKPOINTS) + store.list(layout.WEIGHTS):
        if key.endswith("/manifest.json"):
            manifest = tensor_sets.read_manifest(store, key.removesuffix("manifest.json"))
            digests = {tensor: entry.digest for tensor, entry in manifest.tensors.items()}
            found[key] = (digests, manifest.metadata.get("trainer_state"))
    return found


# How many iterations are replayed before each one, by the interval of checkpoints.
REPLAYED = {2: (0, 1, 0, 1), 3: (0, 1, 2, 0), 9: (0, 1, 2, 3)}


@functools.cache
def undisturbed(model, name):
    """The states of a run that stores each."""
    store = memory_store("replaying")
    for iteration in range(ITERATIONS):
        prepared(run(model, name, 1), iteration)
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
    found = states(store)
    assert len({str(digests) for digests, _ in found.values()}) == len(found)
    return found


def check(store, expected, interval):
    """Each state of the store is the expected one, and the checkpoints are those of the interval."""
    found = states(store)
    assert found == {key: expected[key] for key in found}
    weights = [layout.manifest(layout.weights(version)) for version in range(ITERATIONS + 1)]
    assert set(weights) <= found.keys()
    due = {version for version in range(1, ITERATIONS + 1) if version % interval == 0}
    assert list_versions(store, layout.CHECKPOINTS).complete == due


@pytest.mark.slow
@pytest.mark.parametrize(("name", "interval"), covering(ALGORITHMS, REPLAYED, strength=1))
def test_any_interval_gives_the_same_checkpoints_and_weights(model, name, interval):
    replayed = REPLAYED[interval]
    expected = undisturbed(model, name)
    store = memory_store("replaying")
    for iteration in range(ITERATIONS):
        prepared(run(model, name, interval), iteration)
        metrics = train_small(URL, iteration).metrics
        assert metrics.get("replay/iterations", 0.0) == replayed[iteration]
        assert metrics.get("replay/tensors_changed", 0.0) == 0.0
        assert (metrics.get("timing_s/replay", 0.0) > 0) == (replayed[iteration] > 0)
        report = commit_iteration(URL, iteration)
        assert report.metrics.get("replay/iterations", 0.0) == replayed[iteration]
        sweep(store, ALL)
        assert store.list(layout.journal(iteration)) == []
    check(store, expected, interval)


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.3))
@given(
    name=st.sampled_from(sorted(ALGORITHMS)),
    interval=st.integers(1, 5),
    kills=st.lists(st.tuples(st.integers(0, ITERATIONS - 1), st.integers(0, 90)), min_size=1, max_size=5),
    swept=st.sets(st.integers(0, ITERATIONS - 1)),
)
def test_killed_at_any_request_it_ends_with_the_same_bits(model, name, interval, kills, swept):
    """Before, within and after a replay; with the journals and with the parts that stand for them."""
    expected = undisturbed(model, name)
    store = memory_store("replaying", DiesAtRequest("replaying"))
    for iteration in range(ITERATIONS):
        prepared(run(model, name, interval), iteration)
        for requests in [after for at, after in kills if at == iteration]:
            store.requests_left = requests
            try:
                train_small(URL, iteration)
            except Killed:
                continue
        store.requests_left = NEVER
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
        if iteration in swept:
            sweep(store, ALL)
    check(store, expected, interval)


@pytest.mark.slow
def test_a_replay_reads_the_parts_when_the_journal_is_swept_meanwhile(model):
    expected = undisturbed(model, "grpo")

    class SweptWhileRead(DiesAtWrite):
        """Another process compacts the iterations when the replay has begun to read the second one's journal."""

        armed = False

        def get(self, key, start=0, end=None):
            if self.armed and key.startswith(layout.batches(1)):
                self.armed = False
                swept.append(sweep(self, ALL).compacted)
            return super().get(key, start, end)

    swept = []
    store = memory_store("replaying", SweptWhileRead("replaying", {}))
    for iteration in range(3):
        prepared(run(model, "grpo", 9), iteration)
        store.armed = iteration == 2
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
    assert swept == [(0, 1)]
    found = states(store)
    assert found == {key: expected[key] for key in found}


@pytest.mark.slow
def test_the_fewest_versions_that_are_kept_are_enough_for_a_replay(model):
    expected = undisturbed(model, "ppo with a reference")
    store = memory_store("replaying")
    for iteration in range(ITERATIONS):
        prepared(run(model, "ppo with a reference", 2), iteration)
        sweep(store, FEWEST)
        assert restored_from(store, iteration) == iteration // 2 * 2
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
        sweep(store, FEWEST)
    found = states(store)
    assert found == {key: expected[key] for key in found}
    assert list_versions(store, layout.CHECKPOINTS).complete == {4}


@pytest.mark.slow
def test_a_lost_checkpoint_is_replayed_and_what_lacks_for_that_is_named_before_it_is_planned(model):
    expected = undisturbed(model, "grpo")
    store = memory_store("replaying")
    for iteration in range(2):
        prepared(run(model, "grpo", 1), iteration)
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
        sweep(store, FEWEST)
    for key in store.list(layout.CHECKPOINTS):
        store.delete(key)
    batch, body = layout.batch(0, 0), store.get(layout.batch(0, 0))
    for key in (batch, layout.responses(1)):
        body = store.get(key)
        store.delete(key)
        with pytest.raises((CorruptObject, ObjectMissing), match=key):
            plan_iteration(run(model, "grpo", 1))
        store.put(key, body)
    prepared(run(model, "grpo", 1), 2)
    assert train_small(URL, 2).metrics["replay/iterations"] == 2
    found = states(store)
    assert found == {key: expected[key] for key in found}


@pytest.mark.slow
def test_each_iteration_is_replayed_with_its_own_settings(model):
    """Passes of other sizes add the same gradients in another order, so the last bits depend on them."""
    sizes = (640, 160, 320, 640)
    found = []
    for interval in (1, 9):
        store = memory_store("replaying")
        for iteration, size in enumerate(sizes):
            prepared(run(model, "grpo", interval, micro_batch_tokens_max=size), iteration)
            train_small(URL, iteration)
            commit_iteration(URL, iteration)
        found.append({key: state for key, state in states(store).items() if key.startswith(layout.WEIGHTS)})
    assert found[0] == found[1]
    assert found[0] != {key: state for key, state in undisturbed(model, "grpo").items() if key in found[0]}


@pytest.mark.slow
def test_the_last_iteration_of_an_execution_stores_a_checkpoint_whatever_the_interval(model):
    expected = undisturbed(model, "grpo")
    store = memory_store("replaying")
    for iteration in range(ITERATIONS):
        ends = iteration in (1, 3)
        prepare(run(model, "grpo", 9), EXECUTION, ManualClock(), ends_execution=ends)
        roll_out(URL, iteration)
        assert ("replay/iterations" in train_small(URL, iteration).metrics) == ends
        commit_iteration(URL, iteration)
    found = states(store)
    assert found == {key: expected[key] for key in found}
    assert list_versions(store, layout.CHECKPOINTS).complete == {2, 4}


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 9])
def test_weights_that_another_trainer_has_published_with_other_bits_are_gone_on_from(model, interval):
    """Their trainer has not stored its state. A due checkpoint is that of the trainer that was second."""
    memory_store("replaying")
    other = run(model, "grpo", interval)
    prepared(config(URL, model, optimizer=SCHEDULE | {"learning_rate": 9e-3}, trainer=TWO_BATCHES), 0)
    train_small(URL, 0)
    theirs = {key: body for key, body in everything(connect(URL)).items() if key.startswith(layout.weights(1))}

    class Overtaken(DiesAtWrite):
        """Another trainer publishes its weights just before ours."""

        def create(self, key, body):
            if key == layout.manifest(layout.weights(1)):
                self._objects.update(theirs)
            return super().create(key, body)

    store = memory_store("replaying", Overtaken("replaying", {}))
    prepared(other, 0)
    assert train_small(URL, 0).weight_version == 1
    assert {key: store.get(key) for key in theirs} == theirs
    assert list_versions(store, layout.CHECKPOINTS).complete == ({1} if interval == 1 else set())
    commit_iteration(URL, 0)
    prepared(other, 1)
    metrics = train_small(URL, 1).metrics
    if interval > 1:
        assert (metrics["replay/iterations"], metrics["replay/tensors_changed"] > 0) == (1.0, True)
    # The differences are to what was published, not to what the trainer had.
    assert pull_version(store, 2, None, ManualClock())[0].tensors.keys() == states(store)[WEIGHTS_1][0].keys()
