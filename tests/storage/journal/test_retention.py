"""What a sweep deletes and what it never does, wherever it is interrupted and whoever else writes."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.clock import ManualClock
from storage.journal.compaction import read_responses
from storage.journal.response_parts import ResponsesRecord
from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout
from storage.records.fitness import probe
from storage.records.records import decode
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing, StoreDenied, StoreUnavailable
from storage.weights.manifest import TensorBlock
from storage.weights.stored_versions import list_versions, newest_of
from storage.weights.tensor_sets import publish, pull, read_manifest
from storage.weights.versions import bases, pull_version
from storage.weights.versions import publish_version as publish_difference
from tests.committed_runs import (
    TOKENS,
    commit,
    committed_iteration,
    grade,
    plan_iteration,
    publish_state,
    publish_version,
    roll_out,
    run_of,
)
from tests.property_examples import part_of_examples

DEFAULT = RetentionConfig()
JOURNALS = (layout.journal, layout.claims, layout.alive_all)


def a_run(iterations):
    store = MemoryStore()
    run_of(store, iterations)
    return store


def everything(store):
    return {key: store.get(key) for key in store.list("")}


def journals(store, iteration):
    return [key for prefix in JOURNALS for key in store.list(prefix(iteration))]


def versions(store, prefix):
    return sorted(list_versions(store, prefix).complete)


def test_a_committed_iteration_keeps_its_records_and_its_responses():
    store = a_run(1)
    for key in (layout.environment_state(0, "0" * 64), layout.ask(0, "00000-a", 0)):
        store.put(key, b"{}")
    before = set(store.list(layout.iteration(0)))
    assert len(journals(store, 0)) > 8
    swept = sweep(store, DEFAULT)
    assert (swept.compacted, swept.problems) == ((0,), ())
    gone = before - set(store.list(layout.iteration(0)))
    assert gone == {key for key in before if key.split("/")[2] in swept.counts()}
    assert set(swept.deleted) == gone
    assert swept.counts() == {"journal": 6, "environment": 1, "asks": 1, "claims": 3, "alive": 3}
    parts = {layout.responses_part(0, 0, 3)}
    assert set(store.list(layout.iteration(0))) - before == {layout.responses(0), layout.closed(0)} | parts
    assert [row.token_ids.tolist() for row in read_responses(store, 0)] == [TOKENS[r] for r in range(4)]


def test_a_dry_run_says_the_same_and_does_nothing():
    store = a_run(4)
    before = everything(store)
    told = sweep(store, DEFAULT, dry_run=True)
    assert everything(store) == before
    assert told == sweep(store, DEFAULT)
    assert told.compacted == (0, 1, 2, 3)


def test_sweeping_again_changes_nothing_and_says_so():
    store = a_run(3)
    sweep(store, DEFAULT)
    before = everything(store)
    again = sweep(store, DEFAULT)
    assert (again.compacted, again.deleted, again.problems) == ((), (), ())
    assert everything(store) == before


def test_an_iteration_that_is_not_committed_loses_nothing():
    store = a_run(2)
    plan = plan_iteration(store, 2)
    roll_out(store, plan)
    before = everything(store)
    current = {key for key in before if key.startswith(layout.iteration(2))}
    sweep(store, DEFAULT)
    assert current <= set(store.list(""))
    publish_version(store, 3)  # trained, not yet concluded
    sweep(store, DEFAULT)
    assert current <= set(store.list(""))
    assert {2, 3} <= set(versions(store, layout.WEIGHTS))
    assert {2, 3} <= set(versions(store, layout.CHECKPOINTS))


def test_without_the_weights_that_the_next_iteration_samples_from_the_journal_stays():
    store = a_run(1)
    store.delete(layout.manifest(layout.weights(1)))
    before = journals(store, 0)
    assert sweep(store, DEFAULT).compacted == ()
    assert journals(store, 0) == before


@pytest.mark.slow
def test_a_bounded_number_of_versions_stays_with_version_0_and_what_is_next():
    store = a_run(6)
    sweep(store, RetentionConfig(keep_weights=3, keep_checkpoints=1))
    assert versions(store, layout.WEIGHTS) == [0, 4, 5, 6]
    assert versions(store, layout.CHECKPOINTS) == [6]
    for version in versions(store, layout.WEIGHTS):
        pull(store, layout.weights(version))
    with pytest.raises(ObjectMissing, match="weights/00000003/manifest"):
        pull(store, layout.weights(3))
    assert all(store.list(layout.weights(version)) == [] for version in (1, 2, 3))


def test_the_state_an_unfinished_iteration_restores_from_stays_beside_newer_ones():
    store = a_run(3)
    plan_iteration(store, 3)
    publish_version(store, 4)
    sweep(store, RetentionConfig(keep_checkpoints=1))
    assert versions(store, layout.CHECKPOINTS) == [3, 4]


@pytest.mark.slow
def test_the_bases_of_a_kept_version_are_kept_and_readable():
    """Every fourth version is whole, except for what did not change since an earlier whole one."""
    store = MemoryStore()
    run_of(store, 0)
    frozen = TensorBlock("F32", (64,), bytes(range(256)))
    before = {"a": TensorBlock("F32", (64,), bytes(256)), "frozen": frozen}
    for iteration in range(9):
        now = {"a": TensorBlock("F32", (64,), bytes([iteration + 1, *bytes(255)])), "frozen": frozen}
        publish_state(store, layout.checkpoint(iteration + 1), iteration + 1)
        plan = plan_iteration(store, iteration)
        if iteration:
            published = publish_difference(store, iteration + 1, now, {}, base=before, full_interval=4)
        else:
            published = publish(store, layout.weights(1), now, {})
        roll_out(store, plan)
        grade(store, plan, 0, (0, 1, 2, 3))
        commit(store, plan)
        before = now
        sweep(store, DEFAULT)
        for version in sorted(list_versions(store, layout.WEIGHTS).complete)[-2:]:
            if version:
                assert pull_version(store, version, None, ManualClock())[1]["frozen"] == frozen
    assert published.base == 8
    assert versions(store, layout.WEIGHTS) == bases_of(store, {0, 8, 9})
    assert len(versions(store, layout.WEIGHTS)) < 6


def bases_of(store, kept):
    return sorted({base for version in kept for base in bases(store, version)})


def test_an_unreadable_chain_of_versions_deletes_no_weights_and_the_rest_goes_on():
    store = a_run(5)
    store.put(layout.manifest(layout.weights(5)), b"{")
    swept = sweep(store, DEFAULT)
    assert versions(store, layout.WEIGHTS) == [0, 1, 2, 3, 4, 5]
    assert versions(store, layout.CHECKPOINTS) == [4, 5]
    assert swept.compacted == (0, 1, 2, 3, 4)
    [problem] = swept.problems
    assert problem.startswith("weights: object 'weights/00000005/manifest.json' is corrupt")


def test_objects_after_the_current_version_may_be_about_to_be_published():
    store = a_run(2)
    store.put("weights/00000003/aa.safetensors", b"x")
    store.put("weights/00000001/aa.safetensors", b"half deleted")
    store.delete(layout.manifest(layout.weights(1)))
    sweep(store, DEFAULT)
    assert store.list("weights/00000003/") == ["weights/00000003/aa.safetensors"]
    assert store.list(layout.weights(1)) == []


def test_journals_can_be_kept():
    plain = a_run(1)
    assert sweep(plain, RetentionConfig(compact=False)).compacted == ()
    assert journals(plain, 0)
    assert layout.responses(0) not in plain.list("")


def test_what_zombies_write_afterwards_goes_with_the_next_sweep():
    store = a_run(2)
    sweep(store, DEFAULT)
    late = [layout.shard(0, "00000-a", 7), layout.alive(0, "00000-a"), layout.claim(0, 0, 9)]
    for key in late:
        store.put(key, b"late")
    assert set(sweep(store, DEFAULT).deleted) == set(late)
    assert journals(store, 0) == []


@pytest.mark.slow
def test_a_conclusion_looks_at_the_newest_iterations_only():
    store = a_run(4)
    assert sweep(store, DEFAULT, newest=2).compacted == (2, 3)
    assert sweep(store, DEFAULT).compacted == (0, 1)


def test_one_damaged_iteration_keeps_its_journal_and_does_not_stop_the_others():
    store = a_run(3)
    store.put(layout.shard(1, f"00000-{'b' * 16}", 0), b"damaged")
    before = journals(store, 1)
    swept = sweep(store, DEFAULT)
    assert journals(store, 1) == before
    assert swept.compacted == (0, 2)
    [problem] = swept.problems
    assert problem.startswith("iteration 1: object 'iterations/000001/journal/")


@pytest.mark.slow
def test_an_execution_may_probe_the_store_beside_a_sweep():
    class SweptAt(MemoryStore):
        """Sweeps before the n-th call."""

        left = 0

        def _tick(self):
            self.left -= 1
            if self.left == 0:
                sweep(self, DEFAULT)

        def create(self, key, body):
            self._tick()
            return super().create(key, body)

        def get(self, key, start=0, end=None):
            self._tick()
            return super().get(key, start, end)

        def list(self, prefix, after=""):
            self._tick()
            return super().list(prefix, after)

    for at in range(1, 14):
        store = SweptAt()
        run_of(store, 1)
        store.left = at
        probe(store)
        assert store.left > 0 or journals(store, 0) == []
    assert store.left > 0, "every call was disturbed once"


def test_who_may_not_delete_still_compacts_and_is_told_of_every_refusal():
    class NoDelete(MemoryStore):
        def delete(self, key):
            raise StoreDenied(f"cannot delete {key}")

    store = NoDelete()
    run_of(store, 4)
    swept = sweep(store, DEFAULT)
    assert (swept.compacted, swept.deleted) == ((0, 1, 2, 3), ())
    assert [problem.split(": cannot delete ")[0] for problem in swept.problems] == [
        *(f"iteration {number}" for number in range(4)),
        "weights",
        "checkpoints",
    ]
    assert all(layout.responses(number) in store.list("") for number in range(4))
    assert sweep(store, DEFAULT).compacted == ()


class Dies(MemoryStore):
    """Stops answering at the n-th change, before or after that has taken effect; checks every change it makes."""

    def __init__(self, objects, at, after):
        super().__init__()
        self._objects = dict(objects)
        self._at, self._after = at, after
        self._changes = 0
        self._turn = threading.RLock()
        self.dead = False

    def _change(self, apply):
        with self._turn:
            if self.dead:
                raise StoreUnavailable("dead")
            self._changes += 1
            if self._changes == self._at:
                self.dead = True
                if self._after:
                    apply()
                    check(self)
                raise StoreUnavailable("dies here")
            outcome = apply()
            check(self)
            return outcome

    def create(self, key, body):
        return self._change(lambda: super(Dies, self).create(key, body))

    def delete(self, key):
        self._change(lambda: super(Dies, self).delete(key))


def check(store):
    """Nothing that somebody relies on is missing at this moment."""
    for iteration in range(3):
        kept = [layout.plan(iteration), layout.report(iteration), *(layout.batch(iteration, k) for k in range(2))]
        assert all(key in store._objects for key in kept)
        shards = [layout.shard(iteration, name, number) for name, number in SHARDS]
        if not all(key in store._objects for key in shards):
            parts = decode(ResponsesRecord, layout.responses(iteration), store._objects[layout.responses(iteration)])
            keys = [layout.responses_part(iteration, part.first, part.last) for part in parts.parts]
            assert keys
            assert all(key in store._objects for key in keys)
    for prefix in (layout.WEIGHTS, layout.CHECKPOINTS):
        for version in list_versions(store, prefix).complete:
            folder = f"{prefix}{version:08d}/"
            names = read_manifest(store, folder).objects
            assert all(layout.tensor_object(folder, name) in store._objects for name in names)
    for prefix, needed in ((layout.WEIGHTS, {0, 3}), (layout.CHECKPOINTS, {3})):
        assert needed <= list_versions(store, prefix).complete


SHARDS = [(f"00000-{'a' * 16}", 0), (f"00000-{'b' * 16}", 0), (f"00000-{'b' * 16}", 1), (f"00001-{'c' * 16}", 1)]
RUN = everything(a_run(3))


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.25))
@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=4))
def test_a_sweep_may_die_anywhere_and_be_repeated(deaths):
    undisturbed = Dies(RUN, at=0, after=False)
    sweep(undisturbed, DEFAULT)
    objects = RUN
    for at, after in deaths:
        store = Dies(objects, at, after)
        try:
            sweep(store, DEFAULT)
        except StoreUnavailable:
            assert store.dead
        objects = dict(store._objects)
    last = Dies(objects, at=0, after=False)
    sweep(last, DEFAULT)
    assert last._objects == undisturbed._objects


@pytest.mark.slow
def test_two_sweeps_beside_each_other_end_where_one_does():
    alone, shared = Dies(RUN, 0, after=False), Dies(RUN, 0, after=False)
    sweep(alone, DEFAULT)
    threads = [threading.Thread(target=sweep, args=(shared, DEFAULT)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared._objects == alone._objects


def test_a_run_without_a_committed_iteration_is_left_alone():
    store = MemoryStore()
    publish_version(store, 0)
    roll_out(store, plan_iteration(store, 0))
    before = everything(store)
    assert sweep(store, DEFAULT).deleted == ()
    assert everything(store) == before


def test_the_newest_are_those_with_a_manifest():
    store = MemoryStore()
    for version in (1, 2, 5):
        publish_version(store, version)
    store.put("weights/00000009/aa.safetensors", b"x")
    store.put("weights/other", b"x")
    found = list_versions(store, layout.WEIGHTS)
    assert newest_of(found, 2) == [2, 5]
    assert newest_of(found, 9) == [1, 2, 5]
    assert found.newest == 5
    assert sorted(found.keys) == [1, 2, 5, 9]


@pytest.mark.slow
def test_an_iteration_whose_weights_are_gone_is_still_read():
    store = a_run(5)
    sweep(store, DEFAULT)
    assert versions(store, layout.WEIGHTS) == [0, 4, 5]
    assert len(list(read_responses(store, 1))) == 4
    plan = plan_iteration(store, 5)
    roll_out(store, plan)
    grade(store, plan, 0, (0, 1, 2, 3))
    publish_version(store, 6)
    commit(store, plan)
    committed_iteration(store, 6)
    sweep(store, DEFAULT)
    assert len(list(read_responses(store, 5))) == 4
