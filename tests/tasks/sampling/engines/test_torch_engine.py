import random
from dataclasses import replace

import pytest
import torch

from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from tasks.sampling.engines.engine import EngineError, FinishReason, GenerationRequest
from tasks.sampling.engines.fused_decoder import FusedDecoder
from tasks.sampling.engines.hf_decoder import HuggingFaceDecoder
from tasks.sampling.engines.keyed_noise import sample, signed64
from tasks.sampling.engines.testing import (
    CONTEXT_LENGTH,
    ENDLESS,
    STOPS,
    EngineContract,
    request,
    resumed,
    run,
)
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.weight_tensors import as_block, as_torch
from tests.tiny_model import VOCAB_SIZE, plain_logprobs, tiny_config, tiny_model, weight_blocks

FAMILIES = {
    "qwen2": ("qwen2", {}, FusedDecoder),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}, FusedDecoder),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}, FusedDecoder),
    "llama": ("llama", {"tie_word_embeddings": False}, FusedDecoder),
    "llama tied, biased": ("llama", {"attention_bias": True, "mlp_bias": True}, FusedDecoder),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        FusedDecoder,
    ),
    "mistral": ("mistral", {"sliding_window": None}, FusedDecoder),
    "phi": ("phi", {"tie_word_embeddings": False}, HuggingFaceDecoder),
    "gpt_neox": ("gpt_neox", {}, HuggingFaceDecoder),
    "gpt2": ("gpt2", {"n_inner": 96}, HuggingFaceDecoder),
}


def make_engine(model_dir, model, *, rows=8, context_length=CONTEXT_LENGTH, dtype="float32"):
    model.config.save_pretrained(model_dir)
    engine = TorchEngine(
        model_dir, dtype=dtype, device="cpu", max_responses_in_flight=rows, context_length=context_length
    )
    engine.load_weights(0, weight_blocks(model))
    return engine


@pytest.fixture(scope="module")
def model():
    return tiny_model(tiny_config("qwen2"))


@pytest.fixture(scope="module")
def general_model():
    return tiny_model(tiny_config("gpt_neox"))


@pytest.mark.slow
class TestTorchEngine(EngineContract):
    @pytest.fixture
    def engine_factory(self, tmp_path, model):
        return lambda rows: make_engine(tmp_path, model, rows=rows)

    def weights(self, version):
        return weight_blocks(tiny_model(tiny_config("qwen2"), seed=version))


@pytest.mark.slow
class TestTorchEngineWithHuggingFaceDecoder(EngineContract):
    @pytest.fixture
    def engine_factory(self, tmp_path, general_model):
        return lambda rows: make_engine(tmp_path, general_model, rows=rows)

    def weights(self, version):
        return weight_blocks(tiny_model(tiny_config("gpt_neox"), seed=version))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_a_plain_forward_pass(tmp_path, family):
    model_type, changes, decoder = FAMILIES[family]
    model = tiny_model(tiny_config(model_type, **changes))
    engine = make_engine(tmp_path, model)
    assert type(engine._decoder) is decoder
    items = [request(r, SamplingParams(max_completion_length=30, stop_token_ids=STOPS)) for r in range(8)]
    results = run(engine, items)
    cut = {r: result.token_ids[: 1 + r] for r, result in results.items() if len(result.token_ids) > 1 + r}
    rest = run(engine, [resumed(items[r], token_ids) for r, token_ids in cut.items()])
    for item in items:
        result = results[item.response]
        wanted = plain_logprobs(model, item, result.token_ids)
        assert result.logprobs == pytest.approx(wanted, abs=1e-4)
        if item.response in rest:
            kept = cut[item.response]
            assert kept + rest[item.response].token_ids == result.token_ids
            assert rest[item.response].logprobs == pytest.approx(wanted[len(kept) :], abs=1e-4)


@pytest.mark.slow
def test_200_resumed_responses_are_identical(tmp_path, model):
    rnd = random.Random(3)
    sampling = SamplingParams(max_completion_length=48, stop_token_ids=(2,))
    items = [
        GenerationRequest(
            response, response, tuple(rnd.randrange(4, 80) for _ in range(rnd.randrange(1, 40))), (), 0, sampling
        )
        for response in range(200)
    ]
    items = [replace(item, noise_key=noise_key(5, 0, item.response)) for item in items]
    engine = make_engine(tmp_path, model, rows=50)
    whole, again = {}, {}
    for start in range(0, 200, 50):
        whole |= run(engine, items[start : start + 50])
    rnd.shuffle(items)
    cut = {r: rnd.randrange(len(result.token_ids)) for r, result in whole.items()}
    for start in range(0, 200, 50):
        batch = items[start : start + 50]
        again |= run(engine, [resumed(i, whole[i.response].token_ids[: cut[i.response]]) for i in batch])
    identical = sum(whole[r].token_ids[: cut[r]] + again[r].token_ids == whole[r].token_ids for r in whole)
    assert identical == 200
    assert all(again[r].logprobs == pytest.approx(whole[r].logprobs[cut[r] :], abs=1e-4) for r in whole)
    assert sum(len(result.token_ids) for result in whole.values()) > 4000


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_completion_length=20, temperature=0.6),
        SamplingParams(max_completion_length=20, temperature=1.3, top_p=0.8, top_k=20),
        SamplingParams(max_completion_length=20, temperature=0.0),
    ],
    ids=["temperature", "truncated", "greedy"],
)
def test_logprobs_are_under_the_temperature_and_the_whole_vocabulary(tmp_path, model, sampling):
    items = [request(r, sampling) for r in range(4)]
    for response, result in run(make_engine(tmp_path, model), items).items():
        wanted = plain_logprobs(model, items[response], result.token_ids, sampling.temperature or 1.0)
        assert result.logprobs == pytest.approx(wanted, abs=1e-4)


def test_token_k_is_drawn_with_the_noise_of_position_k(tmp_path, model):
    item = request(5, ENDLESS)
    token_ids = run(make_engine(tmp_path, model), [item])[5].token_ids
    with torch.no_grad():
        logits = model(torch.tensor([[*item.prompt_ids, *token_ids]])).logits[0, len(item.prompt_ids) - 1 : -1]
    count = len(token_ids)
    wanted, _ = sample(
        logits,
        torch.full((count,), signed64(item.noise_key)),
        torch.arange(count),
        torch.ones(count),
        torch.ones(count),
        torch.zeros(count, dtype=torch.int64),
    )
    assert token_ids == wanted.tolist()


def test_greedy_is_the_model_generate(tmp_path, model):
    item = request(9, SamplingParams(max_completion_length=30, temperature=0.0))
    result = run(make_engine(tmp_path, model), [item])[9]
    wanted = model.generate(
        torch.tensor([item.prompt_ids]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert result.token_ids == wanted[0, len(item.prompt_ids) :].tolist()


def test_every_prompt_is_computed_once(tmp_path, model):
    engine = make_engine(tmp_path, model, rows=2)
    items = [request(r, ENDLESS) for r in range(8)]
    for start in range(0, 8, 2):
        run(engine, items[start : start + 2])
    assert engine.prefill_tokens == sum(len(items[r].prompt_ids) - 1 for r in (0, 4))
    engine.load_weights(1, weight_blocks(model))
    run(engine, items[4:5])
    assert engine.prefill_tokens == sum(len(items[r].prompt_ids) - 1 for r in (0, 4, 4))


@pytest.mark.slow
def test_long_prompts_pass_in_pieces_and_the_cache_grows(tmp_path):
    model = tiny_model(tiny_config("qwen3", max_position_embeddings=2048))
    engine = make_engine(tmp_path, model, context_length=1400)
    rnd = random.Random(0)
    items = [
        replace(request(r, ENDLESS, group_size=1), prompt_ids=tuple(rnd.randrange(4, 90) for _ in range(length)))
        for r, length in enumerate((1300, 3, 600, 1, 513, 512))
    ]
    short = [replace(items[1], response=100, sampling=SamplingParams(max_completion_length=300))]
    engine.start(short)
    engine.step()
    engine.start(items)
    results = {r: ([], []) for r in (100, *range(6))}
    while deltas := engine.step():
        for delta in deltas:
            results[delta.response][0].extend(delta.token_ids)
            results[delta.response][1].extend(delta.logprobs)
    assert engine.prefill_tokens == sum(len(item.prompt_ids) - 1 for item in items)
    for item in items:
        token_ids, logprobs = results[item.response]
        assert logprobs == pytest.approx(plain_logprobs(model, item, token_ids), abs=1e-4)


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2"])
def test_whole_context_is_used_and_padding_never_leaves_it(tmp_path, model_type):
    model = tiny_model(tiny_config(model_type, max_position_embeddings=50))
    engine = make_engine(tmp_path, model, context_length=50)
    endless = SamplingParams(max_completion_length=99)
    items = [
        replace(request(0, endless), prompt_ids=tuple(range(4, 52))),
        replace(request(1, endless), prompt_ids=(5,), generated_ids=tuple(range(10, 55))),
        replace(request(4, endless), prompt_ids=tuple(range(4, 24)), generated_ids=tuple(range(10, 37))),
    ]
    for response, result in run(engine, items).items():
        item = next(item for item in items if item.response == response)
        token_ids = [*item.generated_ids, *result.token_ids]
        assert len(item.prompt_ids) + len(token_ids) == 50
        assert result.finish_reason is FinishReason.LENGTH
        wanted = plain_logprobs(model, item, token_ids)[len(item.generated_ids) :]
        assert result.logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("model_type", ["qwen2", "gpt_neox"])
def test_bfloat16_is_close_and_does_not_claim_invariance(tmp_path, model_type):
    model = tiny_model(tiny_config(model_type))
    engine = make_engine(tmp_path, model, dtype="bfloat16")
    assert not engine.batch_invariant
    item = request(0, SamplingParams(max_completion_length=8))
    result = run(engine, [item])[0]
    assert result.logprobs == pytest.approx(plain_logprobs(model, item, result.token_ids), abs=0.5)


def test_stored_dtype_is_converted(tmp_path, model):
    engine = make_engine(tmp_path, model)
    rounded = {name: as_torch(block).bfloat16() for name, block in weight_blocks(model).items()}
    engine.load_weights(1, {name: as_block(tensor) for name, tensor in rounded.items()})
    low = run(engine, [request(0)])
    engine.load_weights(2, {name: as_block(tensor.float()) for name, tensor in rounded.items()})
    assert run(engine, [request(0)]) == low


def test_wrong_weights_are_refused_by_name_and_leave_the_old_ones(tmp_path, model):
    engine = make_engine(tmp_path, model)
    before = run(engine, [request(0)])
    good = weight_blocks(model)
    norm, embedding = "model.norm.weight", "model.embed_tokens.weight"
    cases = {
        "missing model.norm.weight; unknown none": {k: v for k, v in good.items() if k != norm},
        "missing none; unknown model.extra": {**good, "model.extra": good[norm]},
        r"'model.norm.weight' has shape \(65,\); allowed: \(64,\)": {**good, norm: as_block(torch.ones(65))},
        "'lm_head.weight' differs from 'model.embed_tokens.weight'": {
            **good,
            "lm_head.weight": as_block(as_torch(good[embedding]) + 1),
        },
        "dtype: value 'F8_E4M3'": {**good, norm: replace(good[norm], dtype="F8_E4M3", data=bytes(64))},
    }
    for message, tensors in cases.items():
        with pytest.raises(EngineError, match=message):
            engine.load_weights(1, tensors)
    assert run(engine, [request(0)]) == before


def test_tied_weights_may_be_given_twice_or_under_the_other_name(tmp_path, model):
    engine = make_engine(tmp_path, model)
    before = run(engine, [request(0)])
    good = weight_blocks(model)
    embedding = good["model.embed_tokens.weight"]
    engine.load_weights(1, {**good, "lm_head.weight": embedding})
    assert run(engine, [request(0)]) == before
    del good["model.embed_tokens.weight"]
    engine.load_weights(2, {**good, "lm_head.weight": embedding})
    assert run(engine, [request(0)]) == before


def test_untied_head_is_required(tmp_path):
    model = tiny_model(tiny_config("qwen2", tie_word_embeddings=False))
    good = weight_blocks(model)
    del good["lm_head.weight"]
    with pytest.raises(EngineError, match=r"missing lm_head\.weight"):
        make_engine(tmp_path, model).load_weights(1, good)


def test_weights_that_give_no_number_are_reported(tmp_path, model):
    engine = make_engine(tmp_path, model)
    engine.load_weights(1, weight_blocks(model) | {"model.norm.weight": as_block(torch.full((64,), torch.nan))})
    engine.start([request(3)])
    with pytest.raises(EngineError, match="response 3: log-prob nan"):
        engine.step()


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mistral", {"sliding_window": 64}, "sliding_window 64; allowed: at least context_length 160"),
        ("gemma2", {"sliding_window": 32}, "sliding_window 32"),
        ("mamba", {}, "layers of type linear_attention"),
        ("t5", {}, "encoder-decoder"),
        ("qwen2", {"max_position_embeddings": 100}, "context_length: value 160; allowed: up to the model's 100"),
    ],
)
def test_models_the_cache_cannot_serve_are_refused(tmp_path, model_type, changes, message):
    tiny_config(model_type, **changes).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=message):
        TorchEngine(tmp_path, max_responses_in_flight=1, context_length=160, device="cpu")


def test_model_whose_own_code_cannot_use_the_cache_is_refused_at_its_first_weights(tmp_path):
    model = tiny_model(tiny_config("bloom"))  # it wants a 2-d mask for its position bias
    with pytest.raises(EngineError, match="BloomForCausalLM cannot decode from this cache"):
        make_engine(tmp_path, model)


def test_sliding_window_longer_than_the_context_is_served(tmp_path):
    model = tiny_model(tiny_config("gemma2", sliding_window=512, head_dim=16))
    item = request(0, SamplingParams(max_completion_length=40))
    result = run(make_engine(tmp_path, model), [item])[0]
    assert result.logprobs == pytest.approx(plain_logprobs(model, item, result.token_ids), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype: value 'int8'"),
        ({"device": "tpu"}, "device: value 'tpu'"),
        ({"max_responses_in_flight": 0}, "max_responses_in_flight: value 0"),
        ({"model_dir": "/no/such/model"}, r"'/no/such/model' holds no config\.json"),
    ],
)
def test_bad_settings_are_refused(tmp_path, changes, message):
    tiny_config("qwen2").save_pretrained(tmp_path)
    values = {"model_dir": tmp_path, "device": "cpu", "max_responses_in_flight": 1, "context_length": 64}
    values |= changes
    with pytest.raises(EngineError, match=message):
        TorchEngine(values.pop("model_dir"), **values)


def test_unreadable_config_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(EngineError, match="is not understood"):
        TorchEngine(tmp_path, max_responses_in_flight=1, context_length=64, device="cpu")


def test_weights_come_first(tmp_path):
    tiny_config("qwen2").save_pretrained(tmp_path)
    engine = TorchEngine(tmp_path, max_responses_in_flight=1, context_length=64, device="cpu")
    with pytest.raises(EngineError, match="load_weights"):
        engine.start([request(0)])


def test_building_and_sampling_leave_global_random_numbers_alone(tmp_path, model):
    before = torch.get_rng_state()
    run(make_engine(tmp_path, model), [request(0)])
    make_engine(tmp_path, tiny_model(tiny_config("gpt_neox")))
    assert torch.equal(before, torch.get_rng_state())


def test_vocabulary_of_the_fixtures_is_the_contracts(model):
    assert model.config.vocab_size == VOCAB_SIZE
