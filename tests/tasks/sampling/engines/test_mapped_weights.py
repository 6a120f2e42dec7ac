"""Weights that the torch engine uses where they lie, in a mapped pack of a weight cache, and those that it copies."""

from dataclasses import replace

import pytest
import torch

from storage.clock import ManualClock
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.weights.tensor_sets import publish
from storage.weights.versions import publish_version, pull_version
from tasks.sampling.engines.testing import CONTEXT_LENGTH, Result, assert_same, drain, request, run
from tasks.sampling.engines.torch_engine import TorchEngine
from tests.tiny_model import tiny_config, tiny_model, weight_blocks
from tests.weight_chains import cache_at

ASKED = [request(r) for r in range(4)]


def engine_of(model, folder, dtype):
    model.config.save_pretrained(folder)
    return TorchEngine(folder, dtype=dtype, device="cpu", max_responses_in_flight=4, context_length=CONTEXT_LENGTH)


def pulled(store, version, cache):
    return pull_version(store, version, cache, ManualClock())[1]


@pytest.fixture
def published():
    """Two versions in bfloat16."""
    store, versions = (
        MemoryStore(),
        [weight_blocks(tiny_model(tiny_config("qwen2"), seed).bfloat16()) for seed in (0, 1)],
    )
    publish(store, layout.weights(0), versions[0], {})
    publish_version(store, 1, versions[1], {}, base=versions[0], full_interval=10)
    return store, versions


def memory_of(blocks):
    """The addresses of tensors that lie in a mapped file."""
    return {torch.frombuffer(block.data, dtype=torch.uint8).data_ptr() for block in blocks.values() if block.place}


@pytest.mark.parametrize(("dtype", "shares"), [("bfloat16", True), ("float32", False)])
def test_mapped_tensors_of_the_engines_dtype_are_not_copied(tmp_path, published, dtype, shares):
    store, versions = published
    blocks = pulled(store, 0, cache_at(tmp_path / "cache"))
    engine = engine_of(tiny_model(tiny_config("qwen2")), tmp_path, dtype)
    engine.load_weights(0, blocks)
    decoder = engine._decoder
    kept = {decoder._ends.embedding.data_ptr(), decoder._layers[0].attention_norm.data_ptr()}
    if shares:
        kept.add(decoder._layers[1].down.weight.data_ptr())
    assert len(kept & memory_of(blocks)) == (3 if shares else 0)
    copied = engine_of(tiny_model(tiny_config("qwen2")), tmp_path, dtype)
    copied.load_weights(0, versions[0])
    assert_same(run(engine, ASKED), run(copied, ASKED))


def test_a_version_in_place_stays_what_it_is_while_the_next_one_arrives_and_its_pack_is_removed(tmp_path, published):
    store, versions = published
    cache = cache_at(tmp_path / "cache")
    engine, undisturbed = (engine_of(tiny_model(tiny_config("qwen2")), tmp_path, "bfloat16") for _ in range(2))
    undisturbed.load_weights(0, versions[0])
    wanted = run(undisturbed, ASKED)
    engine.load_weights(0, pulled(store, 0, cache))
    engine.start(ASKED)
    results = drain(engine, {r: Result() for r in range(4)}, max_steps=2)
    newer = pulled(store, 1, cache)
    for pack in (tmp_path / "cache").glob("*.pack"):
        pack.unlink()
    assert_same(drain(engine, results), wanted)
    engine.load_weights(1, newer)
    undisturbed.load_weights(1, versions[1])
    assert_same(run(engine, ASKED), run(undisturbed, ASKED))


def test_weights_that_are_copied_take_the_place_of_mapped_ones_and_leave_the_file_as_it_is(tmp_path, published):
    store, versions = published
    blocks = pulled(store, 0, cache_at(tmp_path / "cache"))
    [pack] = (tmp_path / "cache").glob("*.pack")
    stored = pack.read_bytes()
    engine, undisturbed = (engine_of(tiny_model(tiny_config("qwen2")), tmp_path, "bfloat16") for _ in range(2))
    undisturbed.load_weights(1, versions[1])
    wanted = run(undisturbed, ASKED)
    engine.load_weights(0, blocks)
    for _ in range(2):
        engine.load_weights(1, versions[1])
        assert_same(run(engine, ASKED), wanted)
    assert pack.read_bytes() == stored


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_policy_that_trains_on_does_not_change_the_version_in_place(tmp_path, dtype):
    """Its parameters are the memory that is given to the engine."""
    model = tiny_model(tiny_config("qwen2")).to(getattr(torch, dtype))
    engine, undisturbed = (engine_of(model, tmp_path, dtype) for _ in range(2))
    undisturbed.load_weights(0, {name: replace(b, data=bytes(b.data)) for name, b in weight_blocks(model).items()})
    engine.load_weights(0, weight_blocks(model))
    engine.start(ASKED)
    results = drain(engine, {r: Result() for r in range(4)}, max_steps=2)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1.0)
    assert_same(drain(engine, results), run(undisturbed, ASKED))
