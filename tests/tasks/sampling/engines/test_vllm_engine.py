"""The engine contract on vLLM's CPU build, in a process of its own and in ours; then what only vLLM can get wrong."""

import random
from dataclasses import replace

import pytest
import torch

from storage.records.records import SamplingParams
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.engine import EngineDied, EngineError
from tasks.sampling.engines.testing import (
    CONTEXT_LENGTH,
    ENDLESS,
    SAMPLING,
    STOPS,
    Result,
    assert_same,
    drain,
    long_request,
    request,
    resumed,
    run,
)
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.vllm_engine import VllmEngine
from tests.tiny_model import VOCAB_SIZE, plain_logprobs, tiny_model, weight_blocks
from tests.vllm_engines import MISSING, WHY_NOT, EnginePool, VllmContract, vllm_tiny_config

# vLLM and its libraries warn while they are imported, and leave sockets to the garbage collector.
pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
FAMILIES = {
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": None, "tie_word_embeddings": False}),
}


@pytest.fixture(scope="module")
def same_process(tmp_path_factory):
    pool = EnginePool(tmp_path_factory.mktemp("same"), VllmConfig(process="same"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def own_process(tmp_path_factory):
    pool = EnginePool(tmp_path_factory.mktemp("own"), VllmConfig(process="own"))
    yield pool
    pool.close()


@pytest.fixture
def make_engine(same_process, tmp_path):
    """With a model of one's own, or settings."""

    def make(model, *, keyed=True, **config):
        return same_process.make(tmp_path, model, 8, VllmConfig(process="same", **config), keyed=keyed)

    return make


class TestVllmEngineInThisProcess(VllmContract):
    pool_name = "same_process"


class TestVllmEngineInAProcessOfItsOwn(VllmContract):
    pool_name = "own_process"


@pytest.fixture
def engine(same_process):
    engine = same_process.take(8)
    yield engine
    same_process.give_back(engine)


@pytest.fixture
def torch_engine(same_process, tmp_path):
    same_process.model.config.save_pretrained(tmp_path)
    engine = TorchEngine(
        tmp_path, dtype="float32", device="cpu", max_responses_in_flight=8, context_length=CONTEXT_LENGTH
    )
    engine.load_weights(0, weight_blocks(same_process.model))
    yield engine
    engine.close()


def test_every_kind_of_sampling_draws_the_tokens_of_the_torch_engine(engine, torch_engine):
    """In one batch, so that rows with and without noise, and truncated ones, stand beside each other."""
    kinds = [
        SAMPLING,
        replace(SAMPLING, temperature=0.0),
        replace(SAMPLING, temperature=0.5),
        replace(SAMPLING, temperature=1.7),
        replace(SAMPLING, top_p=0.6),
        replace(SAMPLING, top_k=3),
        replace(SAMPLING, temperature=0.8, top_p=0.9, top_k=20),
        ENDLESS,
    ]
    for first in (0, 8, 16):
        items = [request(first + r, sampling) for r, sampling in enumerate(kinds)]
        assert_same(run(engine, items), run(torch_engine, items))


def test_logprobs_are_those_of_a_plain_forward_pass_before_and_after_a_reload(engine, same_process):
    models = [same_process.model, tiny_model(vllm_tiny_config(), seed=5)]
    for version, model in [(0, models[0]), (7, models[1]), (8, models[0])]:
        engine.load_weights(version, weight_blocks(model))
        for temperature in (1.0, 0.6):
            items = [request(r, replace(SAMPLING, temperature=temperature)) for r in range(8)]
            for response, result in run(engine, items).items():
                wanted = plain_logprobs(model, items[response], result.token_ids, temperature)
                assert result.logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_families_are_served_and_reloaded(make_engine, family):
    model_type, changes = FAMILIES[family]
    first, second = (tiny_model(vllm_tiny_config(model_type, **changes), seed=seed) for seed in (0, 1))
    engine = make_engine(first)
    items = [request(r) for r in range(8)]
    for version, model in [(0, first), (1, second)]:
        engine.load_weights(version, weight_blocks(model))
        results = run(engine, items)
        for item in items:
            result = results[item.response]
            wanted = plain_logprobs(model, item, result.token_ids)
            assert result.logprobs == pytest.approx(wanted, abs=1e-4)


def test_old_caches_are_never_used_with_new_weights(engine, same_process):
    """A prompt of many blocks, cached under the old weights, must be computed again with the new ones."""
    item, other = long_request(0, 150), tiny_model(vllm_tiny_config(), seed=3)
    old = run(engine, [item])[0]
    engine.load_weights(1, weight_blocks(other))
    before = engine.prefill_tokens
    new = run(engine, [item])[0]
    assert engine.prefill_tokens - before == 150
    assert new.logprobs == pytest.approx(plain_logprobs(other, item, new.token_ids), abs=1e-4)
    engine.load_weights(2, weight_blocks(same_process.model))
    assert run(engine, [item])[0].token_ids == old.token_ids


def test_preemptions_inside_vllm_change_nothing(make_engine, same_process, torch_engine):
    """256 tokens take 128 KiB of cache here, so that 8 such responses cannot all stay in one of 1 MiB less blocks."""
    engine = make_engine(same_process.model, kv_cache_memory_bytes=1 << 20)
    sampling = SamplingParams(max_completion_length=90, stop_token_ids=STOPS)
    items = [replace(request(r, sampling), prompt_ids=long_request(0, 160 - r).prompt_ids) for r in range(8)]
    whole = run(torch_engine, items)
    assert_same(run(engine, items), whole)
    cut = [
        resumed(item, whole[item.response].token_ids[:9]) for item in items if len(whole[item.response].token_ids) > 9
    ]
    for response, rest in run(engine, cut).items():
        assert rest.token_ids == whole[response].token_ids[9:]


def test_resumed_in_another_order_among_others_is_identical(engine):
    rnd = random.Random(3)
    sampling = SamplingParams(max_completion_length=48, stop_token_ids=(2,))
    items = [
        replace(request(r, sampling), prompt_ids=tuple(rnd.randrange(4, 80) for _ in range(rnd.randrange(8, 40))))
        for r in range(40)
    ]
    whole = {}
    for first in range(0, 40, 8):
        whole |= run(engine, items[first : first + 8])
    cut = [(item, rnd.randrange(1, len(whole[item.response].token_ids) + 1)) for item in items]
    again = [
        resumed(item, whole[item.response].token_ids[:k]) for item, k in cut if k < len(whole[item.response].token_ids)
    ]
    rnd.shuffle(again)
    for first in range(0, len(again), 8):
        batch = again[first : first + 8]
        for response, rest in run(engine, batch).items():
            kept = next(len(item.generated_ids) for item in batch if item.response == response)
            assert rest.token_ids == whole[response].token_ids[kept:]
            assert rest.logprobs == pytest.approx(whole[response].logprobs[kept:], abs=1e-4)


def test_unkeyed_sampling_is_a_sample_that_nobody_repeats(make_engine, same_process):
    engine = make_engine(same_process.model, keyed=False)
    assert not engine.batch_invariant
    assert "unkeyed" in engine.name
    items = [request(r, ENDLESS) for r in range(8)]
    first, second = run(engine, items), run(engine, items)
    assert {r: x.token_ids for r, x in first.items()} != {r: x.token_ids for r, x in second.items()}
    for item in items:
        wanted = plain_logprobs(same_process.model, item, first[item.response].token_ids)
        assert first[item.response].logprobs == pytest.approx(wanted, abs=1e-4)


def test_what_the_installed_vllm_refuses_is_said(make_engine, same_process):
    with pytest.raises(EngineError, match=r"vLLM 0\.\S+ refuses this model or rollout\.vllm: .*nonsense"):
        make_engine(same_process.model, quantization="nonsense")


def test_a_device_that_is_not_there_is_refused(tmp_path, same_process):
    same_process.model.config.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"rollout\.device: value 'cuda', and vLLM 0\.\S+ finds cpu here"):
        VllmEngine(
            tmp_path,
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            max_responses_in_flight=1,
            context_length=64,
            device="cuda",
        )


def test_equal_tensors_may_share_memory_as_they_do_after_a_pull(engine, same_process):
    blocks = weight_blocks(same_process.model)
    first, second = (f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1))
    engine.load_weights(1, blocks | {second: blocks[first]})
    assert run(engine, [request(0)])[0].token_ids


def test_weights_of_another_model_are_refused_and_nothing_is_loaded(engine):
    wrong = weight_blocks(tiny_model(vllm_tiny_config(hidden_size=32)))
    with pytest.raises(EngineError, match="has shape"):
        engine.load_weights(1, wrong)
    assert run(engine, [request(0)])[0].token_ids


def test_weights_that_give_no_number_are_found(engine, same_process):
    blocks = weight_blocks(tiny_model(vllm_tiny_config(), seed=4))
    name = "model.norm.weight"
    blocks[name] = replace(blocks[name], data=torch.full((64,), torch.nan).numpy().tobytes())
    engine.load_weights(1, blocks)
    engine.start([request(0)])
    with pytest.raises(EngineError, match=r"response 0: log-probs .*weights bad"):
        drain(engine, {0: Result()})


def test_a_model_that_vllm_cannot_run_kills_the_engine_in_words(make_engine):
    """There is no CPU kernel for heads of 16."""
    model = tiny_model(vllm_tiny_config(num_attention_heads=4, head_dim=16))
    with pytest.raises(EngineDied, match=r"head_dim"):  # found at the start or in the first step
        run(make_engine(model), [request(0)])


def test_an_engine_has_drawn_with_our_noise_before_it_has_weights_and_keeps_nothing_of_it(
    make_engine, same_process, monkeypatch
):
    from tasks.sampling.engines.vllm_sampler import KeyedBatchRows  # noqa: PLC0415 - only where vLLM is

    drawn, whole = [], KeyedBatchRows.apply

    def seen(self, logits):
        drawn.append(len(logits))
        return whole(self, logits)

    monkeypatch.setattr(KeyedBatchRows, "apply", seen)
    engine = make_engine(same_process.model)
    assert set(drawn) == {1, 2}
    engine.load_weights(0, weight_blocks(same_process.model))
    first = request(0)
    engine.start([first])
    while engine.step():
        pass
    assert engine.prefill_tokens == len(first.prompt_ids)
