"""Adapters that are published alone against merged weights: the same tokens and the same training, through kills."""

import threading
from typing import ClassVar

import pytest

from storage.clock import SystemClock
from storage.journal.assembly import JournalReader
from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout
from storage.records.run import read_plan
from storage.stores.connect import connect
from storage.stores.store import CorruptObject
from storage.weights.adapters import adapter_record, loaded_bytes
from storage.weights.stored_versions import list_versions
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import bases
from tasks.preparing.evaluation import prepare
from tasks.reporting.export_model import export_model
from tasks.sampling.session.member import generate_slot
from tasks.sampling.session.pulled_model import pull_model
from tasks.sampling.session.standing import Post, stand
from tests.dying_store import DiesAtWrite, Killed
from tests.evaluated_run import EVALUATION
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

URL = "memory://adapters"
ITERATIONS = 3
CLOCK = SystemClock()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


def run(model, publish, **sections):
    lora = {"rank": 2, "alpha": 8.0, "publish": publish}
    return config(URL, model, **({"optimizer": {"learning_rate": 1e-2}} | sections), lora=lora)


def played(model, publish, kills=0, sweeps=False):
    """A run of ITERATIONS, whose trainer is killed at each of its first `kills` writes of every iteration."""
    store = memory_store("adapters", DiesAtWrite("adapters", {}))
    tokens = []
    for iteration in range(ITERATIONS):
        plan_iteration(run(model, publish))
        roll_out(URL, iteration)
        tokens.append(sampled(store, iteration))
        for writes in range(kills):
            store.left = writes
            with pytest.raises(Killed):
                train_small(URL, iteration)
        store.left = 1 << 30
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
        if sweeps:
            sweep(store, RetentionConfig(keep_weights=2, keep_checkpoints=1))
    return store, tokens


def sampled(store, iteration):
    """The tokens and log-probs of each response, bit for bit."""
    plan = read_plan(store, iteration)
    reader = JournalReader(store, plan)
    reader.refresh()
    found = [reader.assemble(response) for response in range(plan.num_responses)]
    return [(each.token_ids.tobytes(), each.logprobs.tobytes()) for each in found]


def contents(store, version):
    return {name: bytes(block.data) for name, block in pull_model(store, version, None, CLOCK)[1].items()}


def digests(store, prefix):
    return {name: entry.digest for name, entry in read_manifest(store, prefix).tensors.items()}


@pytest.mark.slow
def test_they_sample_the_same_tokens_and_train_to_the_same_bytes_as_merged_weights_through_kills(model):
    merged, tokens = played(model, "merged")
    expected = {version: contents(merged, version) for version in range(ITERATIONS + 1)}
    states = {v: digests(merged, layout.checkpoint(v)) for v in range(1, ITERATIONS + 1)}
    merged_bytes = read_manifest(merged, layout.weights(2)).num_bytes
    alone, found = played(model, "adapter", kills=4)
    assert found == tokens
    assert {version: contents(alone, version) for version in expected} == expected
    assert {v: digests(alone, layout.checkpoint(v)) for v in states} == states
    # Each version differs from the one before, so that equal tokens are no accident of weights that stand still.
    assert len({str(sorted(each.items())) for each in expected.values()}) == ITERATIONS + 1
    for version in range(1, ITERATIONS + 1):
        manifest = read_manifest(alone, layout.weights(version))
        assert adapter_record(manifest, version).rank == 2
        assert manifest.num_bytes < merged_bytes / 2
        assert loaded_bytes(alone, version) == manifest.num_bytes + merged_bytes
        assert bases(alone, version) == [0, version]


class Overtaken(DiesAtWrite):
    """A store in which another trainer saves its state a moment before the manifest of this one's is written."""

    rivals: ClassVar[dict[str, bytes]] = {}

    def create(self, key, body):
        if key == layout.manifest(layout.checkpoint(1)):
            self._objects.update(self.rivals)
        return super().create(key, body)


@pytest.mark.slow
@pytest.mark.parametrize("publish", ["adapter", "merged"])
def test_a_run_goes_on_from_the_state_that_was_stored_first_whoever_published_the_weights(model, publish):
    """As on GPUs, where the last bits of two trainers differ."""

    def begun(rate):
        store = memory_store("adapters")
        plan_iteration(run(model, publish, optimizer={"learning_rate": rate}))
        roll_out(URL, 0)
        return store

    rival = begun(5e-2)
    train_small(URL, 0)
    found, state = everything(rival), digests(rival, layout.checkpoint(1))
    store = begun(1e-2)
    undisturbed = everything(store)
    train_small(URL, 0)
    ours = contents(store, 1)
    store = memory_store("adapters", Overtaken("adapters", undisturbed))
    store.rivals = {key: body for key, body in found.items() if key.startswith(layout.checkpoint(1))}
    train_small(URL, 0)
    assert digests(store, layout.checkpoint(1)) == state
    assert contents(store, 1) == ours
    commit_iteration(URL, 0)
    plan_iteration(run(model, publish, optimizer={"learning_rate": 1e-2}))
    roll_out(URL, 1)
    train_small(URL, 1)
    assert contents(store, 2) != ours


@pytest.mark.slow
def test_a_standing_member_samples_what_the_members_of_each_iteration_do(model):
    _, tokens = played(model, "adapter")
    store = memory_store("adapters")
    settings = run(model, "adapter", rollout={"crew": "standing", "flush_interval_s": 0.05, "idle_timeout_s": 60.0})
    plan_iteration(settings)
    post = Post(run_url=URL, execution=EXECUTION, slot=0, first=0, iterations=ITERATIONS)
    member = threading.Thread(target=stand, args=(post, lambda: False, CLOCK), daemon=True)
    member.start()
    found = []
    for iteration in range(ITERATIONS):
        if iteration:
            plan_iteration(settings)
        train_small(URL, iteration)
        found.append(sampled(store, iteration))
        commit_iteration(URL, iteration)
    member.join(300)
    assert not member.is_alive()
    assert found == tokens


def test_an_evaluation_of_an_adapter_samples_what_one_of_merged_weights_does(model):
    found = []
    for publish in ("merged", "adapter"):
        played(model, publish)
        reference, slots = prepare(run(model, publish, evaluation=EVALUATION), 1, "e1", CLOCK)
        for slot in slots:
            generate_slot(reference.run_url, 0, slot, lambda: False, CLOCK)
        found.append(sampled(connect(reference.run_url), 0))
    assert len(found[0]) == 15
    assert found[0] == found[1]


def test_retention_keeps_what_an_adapter_needs_and_an_export_holds_the_merged_model(model, tmp_path):
    store, _ = played(model, "adapter", sweeps=True)
    assert list_versions(store, layout.WEIGHTS).complete == {0, ITERATIONS - 1, ITERATIONS}
    exported = export_model(store, tmp_path / "out", CLOCK)
    assert (exported.version, exported.num_bytes) == (ITERATIONS, read_manifest(store, layout.weights(0)).num_bytes)
    held = contents(store, ITERATIONS)
    from safetensors.numpy import load_file  # noqa: PLC0415 - only here

    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in written.items()} == {name: held[name] for name in written}


@pytest.mark.slow
def test_a_damaged_factor_is_named_and_nothing_is_loaded(model):
    store, _ = played(model, "adapter")
    body = everything(store)
    key = next(key for key in body if key.startswith(layout.weights(ITERATIONS)) and key.endswith(".safetensors"))
    for damage in (body[key][:-1] + bytes([body[key][-1] ^ 1]), body[key][:-1]):
        damaged = memory_store("adapters", DiesAtWrite("adapters", body | {key: damage}))
        with pytest.raises(CorruptObject, match=key.split("/")[-1]):
            pull_model(damaged, ITERATIONS, None, CLOCK)
