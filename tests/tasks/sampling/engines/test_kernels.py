"""The torch engine with a cache that is read without masks, and with recorded steps, as on a GPU in half precision.

On a CPU products take the place of flash attention, and tests.recorded_steps that of CUDA graphs.
"""

import logging
from dataclasses import replace

import pytest
import torch

from storage.records.records import SamplingParams
from tasks.sampling.engines import kernels
from tasks.sampling.engines.kernels import Kernels, kernels_for
from tasks.sampling.engines.kv_cache import KeyValueCache
from tasks.sampling.engines.packed_cache import PackedCache
from tasks.sampling.engines.row_attention import plain
from tasks.sampling.engines.testing import (
    CONTEXT_LENGTH,
    ENDLESS,
    EngineContract,
    Result,
    assert_same,
    drain,
    long_request,
    request,
    run,
)
from tasks.sampling.engines.torch_engine import TorchEngine
from tests.recorded_steps import FROM_THE_HOST, WAITS, Operations, Recorder
from tests.tiny_model import tiny_config, tiny_model, weight_blocks

HEADS = (4, 2, 16)
CUDA = torch.device("cuda", 0)


def make_engine(model_dir, model, *, rows=8, context_length=CONTEXT_LENGTH, dtype="float32", kernels=None):
    model.config.save_pretrained(model_dir)
    engine = TorchEngine(
        model_dir,
        dtype=dtype,
        device="cpu",
        max_responses_in_flight=rows,
        context_length=context_length,
        kernels=kernels,
    )
    engine.load_weights(0, weight_blocks(model))
    return engine


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_config("qwen2"))


@pytest.fixture(autouse=True)
def matrices_with_addresses(monkeypatch):
    """In float32 on a CPU matrices are kept in oneDNN's layout, which is no memory that a recording could read."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)


class _Contract(EngineContract):
    dtype = "float32"
    records = True

    @pytest.fixture
    def engine_factory(self, tmp_path, model):
        def make(rows):
            used = Kernels(plain, Recorder() if self.records else None)
            return make_engine(tmp_path, model, rows=rows, dtype=self.dtype, kernels=used)

        return make

    def weights(self, version):
        return weight_blocks(tiny_model(tiny_config("qwen2"), seed=version))

    def release(self, engine):
        assert engine._cache is None or isinstance(engine._cache, PackedCache)
        assert engine._graphs is None or engine._graphs._record is not None, "a step could not be recorded"
        super().release(engine)


@pytest.mark.slow
class TestRecorded(_Contract):
    pass


@pytest.mark.slow
class TestPackedInBfloat16(_Contract):
    dtype = "bfloat16"
    # Neighbouring bfloat16 logits of 4 to 8 are 0.03 apart, and processors with AMX sum products in an order that
    # depends on the number of rows.
    logprobs_within = 0.03
    records = False

    def test_says_what_it_is(self, engine):
        assert engine.name == "torch bfloat16 cpu"
        assert not engine.batch_invariant


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recording_changes_no_bit(tmp_path, model, dtype):
    samplings = [SamplingParams(max_completion_length=20, temperature=t, top_k=k) for t, k in ((1.0, 0), (0.7, 9))]
    items = [request(r, samplings[r // 4]) for r in range(8)]
    recorder = Recorder()
    found, wanted = (
        run(make_engine(tmp_path, model, dtype=dtype, kernels=used), items)
        for used in (Kernels(plain, recorder), Kernels(plain))
    )
    assert recorder.launched > 10
    assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_tokens_are_those_of_the_cache_with_masks(tmp_path, model_type, monkeypatch):
    monkeypatch.setattr("tasks.sampling.engines.prefill_passes.TOKENS_MAX", 200)
    model = tiny_model(tiny_config(model_type, max_position_embeddings=400))
    samplings = [
        SamplingParams(max_completion_length=24, temperature=temperature, top_p=top_p, stop_token_ids=(2,))
        for temperature, top_p in ((1.0, 1.0), (0.7, 0.8), (0.0, 1.0))
    ]
    items = [request(r, samplings[r % 3]) for r in range(7)]
    items += [replace(long_request(r, length), group=r) for r, length in ((20, 250), (21, 300), (22, 250))]
    results = []
    for used in (Kernels(), Kernels(plain), Kernels(plain, Recorder())):
        engine = make_engine(tmp_path, model, rows=5, context_length=340, kernels=used)
        found = {}
        for start in (0, 5):
            found |= run(engine, items[start : start + 5])
        results.append((found, engine.prefill_tokens))
        assert isinstance(engine._cache, KeyValueCache if used.attention is None else PackedCache)
    for found, prefill_tokens in results[1:]:
        assert_same(found, results[0][0])
        assert prefill_tokens == results[0][1]


def test_a_step_waits_once_and_brings_nothing_from_the_host(tmp_path, model, monkeypatch):
    """Python waits to read the tokens alone; a recorded step runs no operation of its own but that read."""
    reads = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(1) or read(tensor))
    for used in (Kernels(), Kernels(plain), Kernels(plain, Recorder())):
        engine = make_engine(tmp_path, model, kernels=used)
        engine.start([request(r, ENDLESS) for r in range(6)])
        for _ in range(3):
            engine.step()
        reads.clear()
        with Operations() as operations:
            for _ in range(4):
                assert len(engine.step()) == 6
        assert len(reads) == 4
        assert operations.named(*WAITS, *FROM_THE_HOST) == []
    assert used.record.launched == 6


def test_responses_that_come_or_go_cost_one_copy_from_the_host(tmp_path, model):
    engine = make_engine(tmp_path, model, kernels=Kernels(plain, Recorder()))
    engine.start([request(r, ENDLESS) for r in range(6)])
    engine.step()
    engine.abort([5])
    with Operations() as operations:
        engine.step()
    assert len(operations.named(*FROM_THE_HOST)) == 2, "the numbers of all responses, integers and others"


def test_new_weights_count_in_steps_that_were_recorded_with_old_ones(tmp_path, model):
    recorder = Recorder()
    engine = make_engine(tmp_path, model, kernels=Kernels(plain, recorder))
    items = [request(r, ENDLESS) for r in range(4)]
    old, before = run(engine, items), recorder.recorded
    other = tiny_model(tiny_config("qwen2"), seed=1)
    engine.load_weights(1, weight_blocks(other))
    new = run(engine, items)
    assert recorder.recorded == before > 0
    assert_same(new, run(make_engine(tmp_path, other), items))
    assert all(new[r].token_ids != old[r].token_ids for r in old)


def test_rows_that_fill_a_batch_up_leave_what_their_rows_keep(tmp_path, model):
    """Nine responses are a batch of ten rows; the tenth row keeps the tokens of an aborted response."""
    recorder = Recorder()
    engine = make_engine(tmp_path, model, rows=12, kernels=Kernels(plain, recorder))
    items = [request(r, SamplingParams(max_completion_length=30)) for r in range(10)]
    whole = run(engine, items)
    engine.start(items)
    results = {r: Result() for r in range(10)}
    drain(engine, results, max_steps=6)
    engine.abort([9])
    drain(engine, results, max_steps=8)
    assert len(engine._batch.token_ids) == 10
    before = engine.prefill_tokens
    engine.start([replace(items[9], generated_ids=tuple(results[9].token_ids))])
    assert engine.prefill_tokens == before, "the row had all of its tokens"
    assert_same(drain(engine, results), whole)


def test_recordings_follow_a_cache_that_grows(tmp_path):
    model = tiny_model(tiny_config("qwen2", max_position_embeddings=1200))
    recorder = Recorder()
    engine = make_engine(tmp_path, model, rows=2, context_length=1200, kernels=Kernels(plain, recorder))
    items = [replace(long_request(r, length), group=r) for r, length in ((0, 500), (1, 20))]
    found = run(engine, items)
    assert engine._cache.capacity == 1024
    assert recorder.recorded >= 2
    assert_same(found, run(make_engine(tmp_path, model, rows=2, context_length=1200), items))


@pytest.mark.parametrize("context_length", [256, 50])
def test_the_whole_context_is_used(tmp_path, model, context_length):
    endless, prompt_length = SamplingParams(max_completion_length=999), context_length - 9
    items = [replace(request(r, endless), prompt_ids=(5,) * (prompt_length - r)) for r in range(3)]
    found = [
        run(make_engine(tmp_path, model, context_length=context_length, kernels=used), items)
        for used in (Kernels(), Kernels(plain, Recorder()))
    ]
    assert_same(*found)
    assert [prompt_length - r + len(result.token_ids) for r, result in found[1].items()] == [context_length] * 3


def test_steps_go_on_where_recording_fails(tmp_path, model, caplog):
    def fails(step, pool):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    items = [request(r, ENDLESS) for r in range(4)]
    with caplog.at_level(logging.WARNING):
        found = run(make_engine(tmp_path, model, kernels=Kernels(plain, fails)), items)
    assert len(caplog.messages) == 1
    assert_same(found, run(make_engine(tmp_path, model), items))


def test_a_models_own_code_is_given_masks(tmp_path):
    model = tiny_model(tiny_config("gpt_neox"))
    engine = make_engine(tmp_path, model, kernels=Kernels(plain, Recorder()))
    assert isinstance(engine._cache, KeyValueCache)
    assert_same(run(engine, [request(0)]), run(make_engine(tmp_path, model), [request(0)]))


def test_by_default_they_are_for_half_precision_on_a_gpu_alone(caplog, monkeypatch):
    tried = []
    monkeypatch.setattr(kernels, "checked", lambda attention, *given: tried.append(given) or attention)
    for dtype in (torch.float32, torch.bfloat16):
        assert kernels_for(HEADS, dtype, torch.device("cpu")) == Kernels()
    assert kernels_for(HEADS, torch.float32, CUDA) == Kernels()
    assert not tried
    assert not caplog.messages
    for dtype in (torch.bfloat16, torch.float16):
        assert kernels_for(HEADS, dtype, CUDA) == Kernels(kernels.flash, kernels.record_on_gpu)
    assert tried == [(HEADS, torch.bfloat16, CUDA), (HEADS, torch.float16, CUDA)]
    monkeypatch.setattr(kernels, "checked", lambda *_: None)
    assert kernels_for(HEADS, torch.bfloat16, CUDA) == Kernels()
    assert kernels_for(None, torch.bfloat16, CUDA) == Kernels()
    assert "this model's own code asks for them" in caplog.text
