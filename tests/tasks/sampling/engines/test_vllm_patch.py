"""Weights of a running vLLM changed in place, on its CPU build with unpacked layers, as on a GPU."""

import logging
import multiprocessing
import re
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from storage.clock import ManualClock
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.weights import deltas
from storage.weights.manifest import ITEM_BYTES
from storage.weights.tensor_sets import publish
from storage.weights.versions import publish_version
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.patched_weights import PatchedWeights
from tasks.sampling.engines.testing import CONTEXT_LENGTH, assert_same, request, run
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.vllm_engine import VllmEngine
from tasks.sampling.engines.vllm_settings import prepare_environment
from tasks.sampling.engines.vllm_weights import VERIFY_INTERVAL
from tasks.sampling.session.pulled_model import pull_model
from tests.tiny_model import VOCAB_SIZE, tiny_model, weight_blocks
from tests.vllm_engines import MISSING, WHY_NOT, vllm_tiny_config
from tests.vllm_without_packing import leave_weights
from tests.weight_chains import cache_at

pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
FAMILIES = {"tied": ("qwen2", {}), "untied": ("qwen3", {"tie_word_embeddings": False})}
ASKED = [request(r) for r in range(8)]
CHANGED = re.compile(r"weights (\d+) in vLLM: .* to change (\d+) bytes")


def stepped(model, seed):
    """Change a twentieth of the elements."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(torch.where(torch.rand_like(each) < 0.05, each + 0.3 * torch.randn_like(each), each))
    return copied(model)


def copied(model):
    return {name: type(b)(b.dtype, b.shape, bytearray(b.data)) for name, b in weight_blocks(model).items()}


def patched(before, after, base):
    def places():
        found = {n: deltas.places(before[n].data, b.data, ITEM_BYTES[b.dtype]) for n, b in after.items()}
        return {name: at for name, at in found.items() if len(at)}

    return PatchedWeights(after, base, places)


@contextmanager
def engines(folder, monkeypatch, model, process):
    """A vLLM without packed layers, and a torch engine."""
    prepare_environment(VllmConfig(process=process))
    leave_weights(monkeypatch, folder)
    model.config.save_pretrained(folder)
    common = {"dtype": "float32", "max_responses_in_flight": 8, "context_length": CONTEXT_LENGTH}
    vllm = VllmEngine(folder, vocab_size=VOCAB_SIZE, config=VllmConfig(process=process), **common)
    plain = TorchEngine(folder, device="cpu", **common)
    try:
        yield vllm, plain
    finally:
        vllm.close()
        plain.close()


def change_loader(monkeypatch, engine, change):
    """Let the model of a vLLM in this process load `change(number, name, tensor)` in place of its tensors."""
    kind = type(engine._core._engine.collective_rpc(lambda worker: worker.model_runner.get_model())[0])
    load = kind.load_weights
    monkeypatch.setattr(
        kind,
        "load_weights",
        lambda self, given: load(
            self, ((name, change(number, name, each)) for number, (name, each) in enumerate(given))
        ),
    )


def changed_versions(caplog):
    return [int(found[1]) for record in caplog.records if (found := CHANGED.match(record.getMessage()))]


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.INFO, "tasks.sampling.engines.vllm_weights")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("process", ["same", "own"])
def test_a_patched_engine_gives_the_responses_of_whole_weights(tmp_path, monkeypatch, caplog, process, family):
    model_type, changes = FAMILIES[family]
    model = tiny_model(vllm_tiny_config(model_type, **changes))
    versions = [copied(model), *(stepped(model, seed) for seed in (1, 2))]
    with engines(tmp_path, monkeypatch, model, process) as (vllm, plain):
        vllm.load_weights(0, versions[0])
        answers = [run(vllm, ASKED)]
        for version, (before, after) in enumerate(pairwise(versions), 1):
            vllm.load_weights(version, patched(before, after, version - 1))
            assert vllm.weight_version == version
            plain.load_weights(version, after)
            answers.append(run(vllm, ASKED))
            assert_same(answers[-1], run(plain, ASKED))
    assert changed_versions(caplog) == [1, 2]
    assert all(one[r].token_ids != other[r].token_ids for one, other in pairwise(answers) for r in (0, 1))


def test_a_patch_for_another_version_than_the_one_in_place_is_not_applied(tmp_path, monkeypatch, caplog):
    model = tiny_model(vllm_tiny_config())
    first, second, third = copied(model), stepped(model, 1), stepped(model, 2)
    with engines(tmp_path, monkeypatch, model, "same") as (vllm, plain):
        vllm.load_weights(0, first)
        vllm.load_weights(2, patched(second, third, 1))
        plain.load_weights(2, third)
        assert_same(run(vllm, ASKED), run(plain, ASKED))
    assert changed_versions(caplog) == []


@pytest.mark.parametrize(
    ("refuses", "reason"),
    [
        (lambda given: given.isnan().any(), "this loader computes"),
        (lambda _: True, None),
    ],
    ids=["which takes whole weights", "which takes nothing any more"],
)
def test_a_loader_that_fails_half_way_leaves_no_mixed_weights(tmp_path, monkeypatch, caplog, refuses, reason):
    model = tiny_model(vllm_tiny_config())
    first, second = copied(model), stepped(model, 1)
    with engines(tmp_path, monkeypatch, model, "same") as (vllm, plain):
        vllm.load_weights(0, first)

        def half(number, _, given):
            if number == len(first) // 2 and refuses(given):
                raise NotImplementedError("this loader computes")
            return given

        change_loader(monkeypatch, vllm, half)
        if reason is None:
            with pytest.raises(EngineDied, match="this loader computes"):
                vllm.load_weights(1, patched(first, second, 0))
            assert vllm.weight_version is None
            with pytest.raises(EngineDied, match="restart"):
                vllm.start(ASKED)
            return
        vllm.load_weights(1, patched(first, second, 0))
        plain.load_weights(1, second)
        assert_same(run(vllm, ASKED), run(plain, ASKED))
        vllm.load_weights(0, patched(second, first, 1))
    assert changed_versions(caplog) == []
    warned = [r.getMessage() for r in caplog.records if r.name.startswith("tasks.") and r.levelno == logging.WARNING]
    assert warned == [f"weights 1: NotImplementedError: {reason}; this engine loads every version whole"]


def test_a_patch_that_vllm_writes_otherwise_is_found_at_once(tmp_path, monkeypatch, caplog):
    model = tiny_model(vllm_tiny_config())
    first, second = copied(model), stepped(model, 1)
    with engines(tmp_path, monkeypatch, model, "same") as (vllm, plain):
        vllm.load_weights(0, first)

        def misplaced(_, name, given):
            """Numbers of one row change places: the row's hash stays."""
            return given.roll(1, 1) if name.endswith("down_proj.weight") and given.isnan().any() else given

        change_loader(monkeypatch, vllm, misplaced)
        vllm.load_weights(1, patched(first, second, 0))
        plain.load_weights(1, second)
        assert_same(run(vllm, ASKED), run(plain, ASKED))
    assert "weights 1: patched weights are not the same as whole ones" in caplog.text
    assert changed_versions(caplog) == []


def test_patches_are_compared_with_whole_weights_again_and_again(tmp_path, monkeypatch, caplog):
    model = tiny_model(vllm_tiny_config())
    versions = [copied(model), stepped(model, 1)]
    with engines(tmp_path, monkeypatch, model, "same") as (vllm, plain):
        vllm.load_weights(0, versions[0])
        for version in range(1, VERIFY_INTERVAL + 2):
            before, after = versions[(version + 1) % 2], versions[version % 2]
            vllm.load_weights(version, patched(before, after, version - 1))
        plain.load_weights(version, after)
        assert_same(run(vllm, ASKED), run(plain, ASKED))
    verified = [r.getMessage() for r in caplog.records if "found to be as the whole" in r.getMessage()]
    assert [int(CHANGED.match(line)[1]) for line in verified] == [1, VERIFY_INTERVAL + 1]
    assert changed_versions(caplog) == list(range(1, VERIFY_INTERVAL + 2))


def io_written(pid):
    return int(re.search(r"wchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[1])


def test_no_version_is_written_whether_it_is_mapped_or_patched(tmp_path, monkeypatch, caplog):
    """Pulled as a member pulls it, from a cache on the same machine, into processes of vLLM's own."""
    model = tiny_model(vllm_tiny_config(hidden_size=256, num_attention_heads=8, num_key_value_heads=4))
    store, versions = MemoryStore(), [copied(model), stepped(model, 1)]
    publish(store, layout.weights(0), versions[0], {})
    publish_version(store, 1, versions[1], {}, base=versions[0], full_interval=10)
    num_bytes = sum(block.num_bytes for block in versions[0].values())
    cache = cache_at(tmp_path / "cache")
    with engines(tmp_path, monkeypatch, model, "own") as (vllm, plain):
        pids = ["self", *(child.pid for child in multiprocessing.active_children())]
        for version in (0, 1):
            _, pulled = pull_model(store, version, cache, ManualClock(), held=vllm.weight_version)
            before = sum(map(io_written, pids))
            vllm.load_weights(version, pulled)
            written = sum(map(io_written, pids)) - before
            assert written < num_bytes * (0.01 if version == 0 else 0.2)
            plain.load_weights(version, versions[version])
            assert_same(run(vllm, ASKED), run(plain, ASKED))
    assert changed_versions(caplog) == [1]


def test_the_cpu_build_as_it_is_loads_every_version_whole(tmp_path, caplog):
    model = tiny_model(vllm_tiny_config())
    first, second = copied(model), stepped(model, 1)
    model.config.save_pretrained(tmp_path)
    common = {"dtype": "float32", "max_responses_in_flight": 8, "context_length": CONTEXT_LENGTH}
    vllm = VllmEngine(tmp_path, vocab_size=VOCAB_SIZE, config=VllmConfig(process="own"), **common)
    plain = TorchEngine(tmp_path, device="cpu", **common)
    vllm.load_weights(0, first)
    vllm.load_weights(1, patched(first, second, 0))
    plain.load_weights(1, second)
    assert_same(run(vllm, ASKED), run(plain, ASKED))
    vllm.close()
    assert "weights 1: vLLM's CPU build packs the weights; this engine loads every version whole" in caplog.text
    assert changed_versions(caplog) == []
