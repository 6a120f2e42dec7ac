"""Names of checkpoints as they are on the hub: what transformers loads is what engines and trainer load, and back."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.models.stored_names import StoredNames, StoredNamesError, own_names
from tests.tasks.models.families import DENSE, MIXTURES, STORED_BY_EXPERT, tiny_config, write_family


def names_of(model_type, stored, **changes):
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes))
    return StoredNames(module, stored)


def on_meta(tensors):
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


@pytest.mark.parametrize("model_type", [*MIXTURES, *DENSE])
def test_a_saved_model_is_loaded_as_transformers_loads_it_and_published_as_it_was_stored(tmp_path, model_type):
    module, stored = write_family(tmp_path, model_type)
    names = names_of(model_type, on_meta(stored))
    names.check_ties(stored)
    own = dict(names.to_module(stored))
    state = module.state_dict()
    assert set(own) == set(own_names(module).values())
    assert all(torch.equal(tensor, state[name]) for name, tensor in own.items())
    assert names.dtypes == {name: tensor.dtype for name, tensor in own.items()}
    back = dict(names.to_stored(own.items()))
    assert back.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in back.items())
    assert (len(stored) > len(own)) == (model_type in [*STORED_BY_EXPERT, "qwen2_moe", "glm4_moe", "ernie4_5_moe"])


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "llama"])
def test_the_names_of_the_module_and_those_without_its_prefix_are_accepted(tmp_path, model_type):
    module, stored = write_family(tmp_path, model_type)
    for given in (module.state_dict(), {name.removeprefix("model."): tensor for name, tensor in stored.items()}):
        names = names_of(model_type, given)
        own = dict(names.to_module(given))
        assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in own.items())
        back = dict(names.to_stored(own.items()))
        assert back.keys() == given.keys()
        assert all(torch.equal(tensor, given[name]) for name, tensor in back.items())


def test_a_dtype_of_the_checkpoint_comes_back(tmp_path):
    _, stored = write_family(tmp_path, "qwen3_moe")
    stored = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in stored.items()}
    names = names_of("qwen3_moe", stored)
    own = {name: tensor.float() for name, tensor in names.to_module(stored)}
    back = dict(names.to_stored(own.items()))
    assert {name: tensor.dtype for name, tensor in back.items()} == {name: t.dtype for name, t in stored.items()}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in back.items())


def test_the_head_of_gpt_neox_has_its_old_name(tmp_path):
    module, stored = write_family(tmp_path, "gpt_neox")
    old = {name.replace("lm_head", "embed_out"): tensor for name, tensor in stored.items()}
    assert "embed_out.weight" in old
    own = dict(names_of("gpt_neox", old).to_module(old))
    assert torch.equal(own["lm_head.weight"], module.lm_head.weight)


def test_buffers_that_a_model_computes_are_passed_over_and_others_are_not(tmp_path):
    """The buffers are those of GPT-2 and Llama files of old releases; the bias of a router's choice counts."""
    _, stored = write_family(tmp_path / "gpt2", "gpt2")
    hub = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    extra = {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    names = names_of("gpt2", hub | extra)
    assert set(names.passed_over) == set(extra)
    assert names.other_names == {"lm_head.weight": "wte.weight"}
    _, stored = write_family(tmp_path / "llama", "llama")
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in (0, 1)}
    assert set(names_of("llama", stored | frequencies).passed_over) == set(frequencies)
    _, stored = write_family(tmp_path / "deepseek", "deepseek_v3")
    bias = next(name for name in stored if name.endswith("e_score_correction_bias"))
    with pytest.raises(StoredNamesError, match=re.escape(f"missing {bias}; unknown none")):
        names_of("deepseek_v3", {name: tensor for name, tensor in stored.items() if name != bias})


def test_a_tied_tensor_may_be_stored_under_any_of_its_names_and_twice_if_it_is_the_same(tmp_path):
    _, stored = write_family(tmp_path, "qwen2")
    embedding = stored["model.embed_tokens.weight"]
    renamed = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in stored.items()}
    names = names_of("qwen2", renamed)
    own = dict(names.to_module(renamed))
    assert own["model.embed_tokens.weight"] is embedding
    assert dict(names.to_stored(own.items())).keys() == renamed.keys()
    assert names.other_names == {"model.embed_tokens.weight": "lm_head.weight"}
    twice = stored | {"lm_head.weight": embedding.clone()}
    names = names_of("qwen2", twice)
    assert names.ties == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert names.other_names == {}
    names.check_ties(twice)
    with pytest.raises(StoredNamesError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        names.check_ties(twice | {"lm_head.weight": embedding * 1.1})


NORM, EXPERT = "model.norm.weight", "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("llama", {NORM: None}, f"missing {NORM}; unknown none; allowed: the model's own names"),
        ("llama", {"lm_head.weight": None}, "missing lm_head.weight (the head, which config.json does not tie"),
        ("llama", {"model.extra": torch.zeros(1)}, "missing none; unknown model.extra"),
        ("llama", {NORM: torch.zeros(33)}, f"'{NORM}' has shape (33,); allowed: (32,) (config.json)"),
        ("llama", {NORM: torch.zeros(32).to(torch.float8_e4m3fn)}, f"'{NORM}' has the dtype float8_e4m3fn; allowed: "),
        ("llama", {NORM: torch.zeros(32, dtype=torch.int32)}, f"'{NORM}' has the dtype int32; allowed: float64, "),
        ("llama", {f"{NORM}_scale_inv": torch.zeros(1)}, f"unknown {NORM}_scale_inv"),
        ("llama", {"norm.weight": torch.zeros(32)}, "'norm.weight' and 'model.norm.weight' are both stored for"),
        ("qwen3_moe", {EXPERT: None}, "'model.layers.1.mlp.experts.0.gate_proj.weight' cannot be converted: "),
        ("qwen3_moe", {EXPERT: torch.zeros(24, 31)}, "experts.0.gate_proj.weight' cannot be converted: stack expects"),
        ("qwen3_moe", {EXPERT: torch.zeros(24, 32).int()}, f"'{EXPERT}' has the dtype int32"),
        ("qwen3_moe", {EXPERT.replace(".2.", ".70."): torch.zeros(24, 32), EXPERT: None}, "cannot undo its conversion"),
        (
            "qwen3_moe",
            {EXPERT.replace(".2.up", f".12.{one}"): torch.zeros(24, 32) for one in ("up", "gate")},
            "'model.layers.1.mlp.experts.gate_up_proj', of 26 tensors, has shape (13, 48, 32); allowed: (12, 48, 32)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_that_names_it(tmp_path, model_type, change, message):
    _, stored = write_family(tmp_path, model_type)
    changed = {name: tensor for name, tensor in (stored | change).items() if tensor is not None}
    for given in (changed, on_meta(changed)):
        with pytest.raises(StoredNamesError, match=re.escape(message)) as refused:
            names_of(model_type, given)
        assert "\n" not in str(refused.value)


def test_rows_other_than_the_vocabulary_are_refused(tmp_path):
    _, stored = write_family(tmp_path, "llama")
    with pytest.raises(StoredNamesError, match=r"has shape \(48, 32\); allowed: \(50, 32\) \(config\.json\)"):
        names_of("llama", stored, vocab_size=50)
