"""Families whose stored tensors are not those of the module: engine and trainer load and compute one policy."""

import pytest
import torch

from storage.records.records import SamplingParams
from tasks.configuration.lora import LoraConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.adapted_policy import AdaptedPolicy
from tasks.learning.batching import collate
from tasks.learning.critic import Critic
from tasks.learning.policy import Policy, PolicyError
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.testing import resumed, run
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.weight_tensors import as_block
from tests.tasks.models.families import DENSE, MIXTURES, write_family

pytestmark = pytest.mark.slow

CPU = TrainerConfig(device="cpu")
TOLERANCE = {"rtol": 0.0, "atol": 3e-5}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROMPTS = ((5, 6, 7), (9, 10, 11, 12, 13, 14, 15), (3, 4), (20, 21, 22, 23))


def requests():
    params = SamplingParams(max_completion_length=16)
    return [GenerationRequest(each, each, prompt, (), 11 + each, params) for each, prompt in enumerate(PROMPTS)]


def loaded(directory, stored):
    engine = TorchEngine(directory, dtype="float32", device="cpu", max_responses_in_flight=4, context_length=64)
    engine.load_weights(0, {name: as_block(tensor) for name, tensor in stored.items()})
    return engine


def trained(policy, results):
    """The trainer's log-probs of each response, all in one batch."""
    completions = [result.token_ids for result in results.values()]
    batch = collate(
        list(results), [list(prompt) for prompt in PROMPTS], completions, [[0.0] * len(c) for c in completions]
    )
    logprobs, _ = policy.logprobs(batch, 1.0)
    return {
        response: logprobs[row, : len(c)] for row, (response, c) in enumerate(zip(results, completions, strict=True))
    }


@pytest.mark.parametrize("model_type", [*MIXTURES, *DENSE])
def test_log_probs_agree_and_tokens_depend_on_neither_batch_nor_resumption(tmp_path, model_type):
    _, stored = write_family(tmp_path, model_type)
    engine = loaded(tmp_path, stored)
    results = run(engine, requests())
    for response, logprobs in trained(Policy(tmp_path, stored, CPU), results).items():
        torch.testing.assert_close(torch.tensor(results[response].logprobs), logprobs.detach(), **TOLERANCE)
    item = requests()[1]
    tokens = results[1].token_ids
    assert run(engine, [item])[1].token_ids == tokens
    cut = len(tokens) // 2
    others = [each for each in requests() if each.response != 1][:2]
    assert run(engine, [*others, resumed(item, tokens[:cut])])[1].token_ids == tokens[cut:]


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "phimoe"])
def test_a_step_changes_experts_and_is_published_under_the_stored_names(tmp_path, model_type):
    _, stored = write_family(tmp_path, model_type)
    policies = [
        Policy(tmp_path, stored, TrainerConfig(device="cpu", gradient_checkpointing=on)) for on in (False, True)
    ]
    results = run(loaded(tmp_path, stored), requests())
    for policy in policies:
        torch.cat(list(trained(policy, results).values())).sum().backward()
        with torch.no_grad():
            for parameter in policy.parameters().values():
                parameter.sub_(0.05 * parameter.grad.clamp(-1, 1))
    for name, parameter in policies[0].parameters().items():
        torch.testing.assert_close(policies[1].parameters()[name], parameter, rtol=1e-5, atol=1e-6)
    policy = policies[0]
    names = policy.stored_names(stored)
    published = dict(names.to_stored(policy.each_tensor(dtypes=names.dtypes)))
    assert {name: tensor.shape for name, tensor in published.items()} == {name: t.shape for name, t in stored.items()}
    experts = [name for name in stored if ".experts." in name]
    assert len(experts) >= 12
    # An expert that no token chose stays as it is.
    assert sum(not torch.equal(published[name], stored[name]) for name in experts) > len(experts) // 2
    again = run(loaded(tmp_path, published), requests())
    for response, logprobs in trained(policy, again).items():
        torch.testing.assert_close(torch.tensor(again[response].logprobs), logprobs.detach(), **TOLERANCE)


def test_a_critic_begins_with_the_body_of_a_mixture(tmp_path):
    module, stored = write_family(tmp_path, "mixtral")
    critic = Critic.of_policy(tmp_path, stored, CPU)
    body = module.base_model.state_dict()
    own = {name.removeprefix("model."): tensor for name, tensor in critic.tensors().items() if "value_head" not in name}
    assert own.keys() == body.keys()
    assert all(torch.equal(tensor, body[name]) for name, tensor in own.items())


@pytest.mark.parametrize("publish", ["merged", "adapter"])
def test_adapters_of_a_mixture_are_those_of_its_linear_layers(tmp_path, publish):
    _, stored = write_family(tmp_path, "mixtral")
    policy = AdaptedPolicy(tmp_path, stored, CPU, LoraConfig(rank=2, alpha=4.0, publish=publish), seed=1)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in policy.parameters()} == set(ATTENTION)
    for parameter in policy.parameters().values():
        torch.nn.init.normal_(parameter, std=0.3)
    names = policy.stored_names(stored)
    merged = dict(names.to_stored(policy.each_tensor(dtypes=names.dtypes)))
    assert merged.keys() == stored.keys()
    assert {name for name in stored if not torch.equal(merged[name], stored[name])} == {
        f"model.layers.{layer}.self_attn.{name}.weight" for layer in (0, 1) for name in ATTENTION
    }
    results = run(loaded(tmp_path, merged), requests())
    for response, logprobs in trained(policy, results).items():
        torch.testing.assert_close(torch.tensor(results[response].logprobs), logprobs.detach(), **TOLERANCE)


def test_adapters_that_cannot_be_published_are_refused(tmp_path):
    """Of the experts, which peft adapts in its own way; and alone, where the files do not name what is adapted so."""
    _, stored = write_family(tmp_path, "deepseek_v3")
    with pytest.raises(
        PolicyError, match=r"would adapt model\.layers\.1\.mlp\.experts\.\w+, too, .*; allowed: names that"
    ):
        AdaptedPolicy(tmp_path, stored, CPU, LoraConfig(rank=2, alpha=4.0), seed=1)
    _, stored = write_family(tmp_path, "llama")
    bare = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    AdaptedPolicy(tmp_path, bare, CPU, LoraConfig(rank=2, alpha=4.0), seed=1)
    with pytest.raises(
        PolicyError, match=r"lora\.publish: value 'adapter', and the model's files have no 'model\.layers"
    ):
        AdaptedPolicy(tmp_path, bare, CPU, LoraConfig(rank=2, alpha=4.0, publish="adapter"), seed=1)


def noisy(module):
    """Noise before each router that asks no configuration and no mode whether it may be drawn."""
    for part in module.modules():
        if type(part).__name__ == "MixtralTopKRouter":
            part.register_forward_pre_hook(lambda _, given: (given[0] * torch.empty_like(given[0]).uniform_(0.9, 1.1),))


def test_a_model_that_draws_numbers_even_so_is_refused(tmp_path):
    _, stored = write_family(tmp_path, "mixtral")
    with pytest.raises(PolicyError, match="MixtralForCausalLM draws random numbers in training"):
        Policy(tmp_path, stored, CPU, adapt=noisy)
