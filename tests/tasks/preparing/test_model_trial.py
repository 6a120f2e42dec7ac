"""A model that trainer or engine would refuse on the machines of a run is refused before, by its name.

To add a case, add a line to REFUSED: how the model is made and damaged, and what the one line about it says.
"""

import json
import shutil

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from storage.records.records import SamplingParams
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import collate
from tasks.learning.policy import Policy
from tasks.learning.pretrained import ModelError, read_tensors
from tasks.preparing.checks import check_files
from tasks.preparing.model_check import check_model_use
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.weight_tensors import as_torch
from tests.small_run import config
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model, tiny_tokenizer

CONTEXT = 256
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 100,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
USABLE = [
    *(
        (name, {})
        for name in ("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "opt", "falcon", "olmo2", "phi3")
    ),
    *(("mixtral", LOCAL), ("qwen3_moe", MOE | {"head_dim": 16}), ("olmoe", MOE), ("gemma3_text", {"head_dim": 16})),
    ("phi3", {"max_position_embeddings": 100, "rope_parameters": LONGROPE, "original_max_position_embeddings": 100}),
]


def saved(folder, model_type="llama", weights=lambda tensors: tensors, fields=None, **changes):
    """A model directory of a family; `weights` and `fields` change its tensors and its config.json."""
    save_tiny_model(folder, tiny_model(tiny_config(model_type, **changes)))
    file = folder / "model.safetensors"
    tensors = weights(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | (fields or {})))
    return folder


def run_of(model, **sections):
    return config("memory://model-trial", model, **({"rollout": {"engine": "torch"}} | sections))


def computed(model, context=CONTEXT):
    """Log-probs of three tokens that the engine draws: its own, and those of the trainer."""
    tensors = read_tensors(model)
    engine = TorchEngine(model, max_responses_in_flight=2, context_length=context, device="cpu")
    engine.load_weights(0, tensors)
    engine.start([GenerationRequest(0, 0, (5, 6, 7), (), 11, SamplingParams(max_completion_length=8))])
    tokens, sampled = [], []
    while deltas := engine.step():
        tokens += [token for delta in deltas for token in delta.token_ids]
        sampled += [logprob for delta in deltas for logprob in delta.logprobs]
    given = {name: as_torch(block) for name, block in tensors.items()}
    policy = Policy(model, given, TrainerConfig(dtype="float32", device="cpu"))
    batch = collate([0], [[5, 6, 7]], [tokens], [[0.0] * len(tokens)])
    return sampled, policy.logprobs(batch, 1.0)[0][0].tolist()


@pytest.mark.parametrize(("model_type", "changes"), USABLE)
def test_a_usable_model_is_accepted(tmp_path, model_type, changes):
    model = saved(tmp_path, model_type, **changes)
    assert check_model_use(run_of(model), model).doubts == ()


def _without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
UNTIED = {"tie_word_embeddings": False}
REFUSED = [
    ({"fields": {"vocab_size": 97}}, r"'model.embed_tokens.weight' has shape \(96, 64\); allowed: \(97, 64\)"),
    ({"fields": {"hidden_size": 32}}, "has shape"),
    ({"fields": {"num_hidden_layers": 3}}, "missing model.layers.2.input_layernorm.weight"),
    ({"fields": {"num_hidden_layers": 1}}, "unknown model.layers.1.input_layernorm.weight"),
    ({"fields": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000, and the weights have"),
    ({"weights": _without(HEAD), **UNTIED}, r"missing lm_head.weight"),
    (
        {"weights": lambda t: t | {HEAD: t[EMBEDDING] * 1.1}},
        "'lm_head.weight' differs from 'model.embed_tokens.weight'",
    ),
    ({"weights": lambda t: t | {"model.extra": torch.ones(1)}}, "unknown model.extra"),
    (
        {"weights": lambda t: t | {EMBEDDING: t[EMBEDDING].to(torch.int8)}},
        "'model.embed_tokens.weight' has the dtype int8",
    ),
    ({"weights": lambda t: t | {EMBEDDING: t[EMBEDDING].to(torch.float8_e4m3fn)}}, "with dtype F8_E4M3 belongs to"),
    (
        {"weights": lambda t: t | {"model.layers.0.mlp.up_proj.qweight": torch.ones(2)}},
        "qweight' with dtype F32 belongs",
    ),
    *(
        (
            {"fields": {"quantization_config": {"quant_method": name}}},
            rf"quantised \({name}\); allowed: weights in float32",
        )
        for name in ("fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4")
    ),
    ({"fields": {"model_type": "xmodel", "auto_map": {"AutoConfig": "x.X"}}}, "its own code .auto_map. is never run"),
    ({"fields": {"model_type": "xmodel"}}, "model_type 'xmodel' is not one that transformers"),
    ({"fields": {"model_type": None}}, "model_type 'None' is not one"),
    ({"fields": {"hidden_act": "no-such"}}, "policy.path: "),
    ({"fields": {"num_attention_heads": 0}}, "policy.path: "),
    ({"model_type": "gemma2", "head_dim": 16}, "Gemma2ForCausalLM transforms its logits"),
    (
        {"model_type": "granite", "logits_scaling": 8.0},
        r"GraniteForCausalLM transforms its logits \(logits_scaling 8.0\)",
    ),
    ({"model_type": "cohere"}, r"CohereForCausalLM transforms its logits \(logit_scale 0.0625\)"),
    ({"model_type": "mistral", "sliding_window": 64}, "sliding_window 64; allowed: at least context_length 256"),
    ({"model_type": "gemma3_text", "sliding_window": 64, "head_dim": 16}, "sliding_window 64"),
    ({"model_type": "bloom", "fields": {"seq_length": 256}}, "BloomForCausalLM cannot decode from this cache"),
    ({"model_type": "falcon", "alibi": True}, "FalconForCausalLM cannot decode from this cache"),
    ({"model_type": "mamba", "fields": {"max_position_embeddings": 256}}, "layers of type linear_attention"),
    (
        {"rope_parameters": LONGROPE | {"factor": 2.0}},
        "rollout.context_length: value 256; allowed: up to 100, because Llama",
    ),
    (
        {"model_type": "phi3", "rope_parameters": LONGROPE, "original_max_position_embeddings": 100},
        "allowed: up to 100, because Phi3ForCausalLM",
    ),
]


@pytest.mark.parametrize(("made", "message"), REFUSED)
def test_an_unusable_model_is_refused_in_one_line(tmp_path, made, message):
    model = saved(tmp_path, **made)
    with pytest.raises(ModelError, match=message) as caught:
        check_model_use(run_of(model), model)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_with_a_context_below_it_a_model_of_two_rotations_is_accepted(tmp_path):
    model = saved(tmp_path, "llama", rope_parameters=LONGROPE | {"factor": 2.0})
    assert check_model_use(run_of(model, rollout={"engine": "torch", "context_length": 100}), model).doubts == ()


def test_a_vision_language_model_is_refused_by_name(tmp_path):
    text = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    text |= {k: v for k, v in tiny_config("qwen2").to_dict().items() if k in ("vocab_size", "hidden_size")}
    text |= {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = transformers.Qwen2_5_VLConfig(text_config=text | {"max_position_embeddings": 256}, vision_config=vision)
    AutoModelForImageTextToText.from_config(made).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="of model_type 'qwen2_5_vl' transformers has no causal language model"):
        check_model_use(run_of(tmp_path), tmp_path)


def test_what_the_torch_engine_alone_refuses_is_a_doubt_where_vllm_may_generate(tmp_path):
    model = saved(tmp_path, "mistral", sliding_window=64)
    gpus = {"rollout": {"gpus": 1, "accelerator": "nvidia-l4", "usd_per_hour": 1.0}}
    [doubt] = check_model_use(run_of(model, rollout={"engine": "auto"}, pools=gpus), model).doubts
    assert "sliding_window 64" in doubt
    assert "so rollout.engine auto needs vLLM" in doubt
    assert check_model_use(run_of(model, rollout={"engine": "vllm"}), model).doubts == ()


def test_vllm_builds_what_the_configuration_names(tmp_path):
    model = saved(tmp_path, "llama", fields={"architectures": ["LlamaForSequenceClassification"]})
    with pytest.raises(ModelError, match=r"architectures is .*, which vLLM would build, and the trainer builds Llama"):
        check_model_use(run_of(model, rollout={"engine": "vllm"}), model)
    assert check_model_use(run_of(model), model).doubts == ()


def test_experts_in_vllm_are_doubted_on_a_gpu_and_refused_on_a_cpu(tmp_path):
    model = saved(tmp_path, "mixtral", **LOCAL)
    [doubt] = check_model_use(run_of(model, rollout={"engine": "vllm"}), model).doubts
    assert doubt.startswith("rollout.engine: whether vLLM computes this mixture of experts")
    with pytest.raises(ModelError, match="vLLM's CPU build computes another model when a mixture of experts"):
        check_model_use(run_of(model, rollout={"engine": "vllm", "device": "cpu"}), model)


def test_a_dtype_in_which_the_model_does_not_train_is_refused_on_a_cpu_and_doubted_on_a_gpu(tmp_path):
    # Its positions are a float32 buffer, which it adds to its activations.
    sizes = {"vocab_size": 300, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}
    save_tiny_model(tmp_path, tiny_model(transformers.XGLMConfig(**sizes, max_position_embeddings=256)))

    def tried(**trainer):
        return check_model_use(run_of(tmp_path, rollout={"engine": "vllm"}, trainer=trainer), tmp_path).doubts

    assert tried(dtype="float32", device="cpu") == ()
    [doubt] = tried(dtype="bfloat16")
    assert doubt.startswith("trainer.dtype: whether the model trains in bfloat16, which fails on a CPU: ")
    with pytest.raises(ModelError, match=r"trainer\.dtype: value 'bfloat16'; allowed with XGLMForCausalLM: 'float32'"):
        tried(dtype="bfloat16", device="cpu")
    llama = saved(tmp_path / "llama", "llama")
    assert check_model_use(run_of(llama, trainer={"dtype": "bfloat16", "device": "cpu"}), llama).doubts == ()


def test_layers_that_cannot_be_adapted_are_refused(tmp_path):
    pytest.importorskip("peft")
    model = saved(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"lora\.target_modules: model\.embed_tokens is of type Embedding"):
        check_model_use(run_of(model, lora={"target_modules": ["embed_tokens"]}), model)
    assert check_model_use(run_of(model, lora={"rank": 2}), model).doubts == ()


def test_a_critic_is_tried_too(tmp_path, monkeypatch):
    model = saved(tmp_path, "qwen2")
    asked = run_of(model, algorithm={"preset": "ppo"})
    assert check_model_use(asked, model).doubts == ()
    monkeypatch.setattr("tasks.learning.critic._body", lambda _: 1 / 0)
    shutil.copytree(model, tmp_path / "again")
    with pytest.raises(ZeroDivisionError):
        check_model_use(asked, tmp_path / "again")


def test_a_prompt_of_tokens_without_an_embedding_is_refused(tmp_path):
    model = saved(tmp_path, "qwen2", vocab_size=20)
    with pytest.raises(
        ValueError, match=r"prompt '\w+' has the token \d+, for which the model has no embedding; .* 20"
    ):
        check_files(run_of(model))


def test_added_tokens_without_an_embedding_are_doubted(tmp_path):
    model = saved(tmp_path, "qwen2")
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<later>"])
    tokenizer.save_pretrained(model)
    [doubt] = check_model_use(run_of(model), model).doubts
    assert "1 tokens of the tokenizer, such as '<later>', have ids from 96" in doubt


def _on_embedding(change):
    """A change of a family's embeddings, by whatever name they have."""

    def changed(tensors):
        name = next(name for name in tensors if name.endswith(("embed_tokens.weight", "embed_in.weight")))
        return tensors | change(name, tensors[name])

    return changed


EDITS = {
    "nothing": {},
    "rotary frequencies": {"weights": lambda t: t | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}},
    "a head of its own": {"weights": _on_embedding(lambda _, values: {HEAD: values.clone()})},
    "another head": {"weights": _on_embedding(lambda _, values: {HEAD: values + 1})},
    "a row less": {"weights": _on_embedding(lambda name, values: {name: values[1:]})},
    "a norm less": {"weights": _without("model.norm.weight", "gpt_neox.final_layer_norm.weight")},
    "half precision": {"weights": lambda t: {name: tensor.bfloat16() for name, tensor in t.items()}},
    "a layer less": {"fields": {"num_hidden_layers": 1}},
    "untied": {"fields": {"tie_word_embeddings": False}},
    "other prefix": {"weights": lambda t: {name.removeprefix("model."): tensor for name, tensor in t.items()}},
}
FAMILIES = ["llama", "qwen3", "gemma", "gemma2", "gpt_neox", "stablelm", "granite", "olmoe", "mistral", "phi3"]


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FAMILIES), st.sampled_from(sorted(EDITS)), st.sampled_from([None, 64, 512]), st.booleans())
def test_what_is_accepted_is_loaded_by_engine_and_trainer_which_agree(tmp_path, family, edit, window, tied):
    changes = {"head_dim": 16} if family.startswith("gemma") else MOE if family == "olmoe" else {}
    changes |= {"sliding_window": window} if family in ("mistral", "gemma2") and window else {}
    shutil.rmtree(tmp_path / "model", ignore_errors=True)
    model = saved(tmp_path / "model", family, **EDITS[edit], tie_word_embeddings=tied, **changes)
    try:
        check_model_use(run_of(model), model)
    except ModelError:
        return
    sampled, trained = computed(model)
    assert sampled == pytest.approx(trained, abs=1e-4)
