"""Whether a head is linear is found without weights, whatever the family, and leaves the model as it was."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tasks.learning.head import check_head
from tasks.learning.trained_model import PolicyError
from tests.tiny_model import tiny_config, tiny_model

LINEAR = ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "gpt2", "gpt_neox", "opt", "gptj", "olmo2", "mixtral"]
TRANSFORMED = [
    ("gemma2", {}, "Gemma2ForCausalLM transforms its logits (final_logit_softcapping 30.0)"),
    ("granite", {"logits_scaling": 8.0}, "GraniteForCausalLM transforms its logits (logits_scaling 8.0)"),
    ("cohere", {"logit_scale": 0.0625}, "CohereForCausalLM transforms its logits (logit_scale 0.0625)"),
    ("cohere2", {"logit_scale": 0.9}, "Cohere2ForCausalLM transforms its logits (logit_scale 0.9)"),
]


def on_meta(model_type, **changes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(model_type, **changes))


@pytest.mark.parametrize("model_type", LINEAR)
def test_a_linear_head_is_accepted_without_weights(model_type):
    model = on_meta(model_type)
    check_head(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("model_type", "changes", "message"), TRANSFORMED)
def test_logits_that_are_scaled_or_capped_are_refused_by_name(model_type, changes, message):
    with pytest.raises(PolicyError) as caught:
        check_head(on_meta(model_type, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "changes"), [("granite", {"logits_scaling": 1.0}), ("cohere", {"logit_scale": 1.0})]
)
def test_a_scale_of_one_is_no_transformation(model_type, changes):
    check_head(on_meta(model_type, **changes))
    assert tiny_config(model_type, **changes).model_type == model_type


def test_a_cap_is_found_where_the_weights_give_small_logits():
    """Below the cap's tenth it changes logits by less than rounding would show."""
    model = tiny_model(tiny_config("gemma2", head_dim=16, final_logit_softcapping=50.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-3)
    with pytest.raises(PolicyError, match="Gemma2ForCausalLM transforms its logits"):
        check_head(model)


def test_a_body_that_gets_other_inputs_than_the_tokens_is_refused(monkeypatch):
    model = on_meta("qwen2")

    def forward(self, input_ids, use_cache):
        del use_cache
        return self.model(inputs_embeds=torch.ones(1, 4, 64), attention_mask=input_ids)

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(PolicyError, match=r"Qwen2ForCausalLM computes its logits by more than its body .*tokens alone"):
        check_head(model)


def test_a_model_whose_head_is_its_body_or_no_matrix_is_refused():
    model = on_meta("qwen2")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(PolicyError, match="Qwen2ForCausalLM has no linear head"):
        check_head(model)
    llama4 = on_meta("llama4_text", num_local_experts=2, intermediate_size_mlp=32, head_dim=16)
    with pytest.raises(PolicyError, match="Llama4ForCausalLM has no body apart from its head"):
        check_head(llama4)
