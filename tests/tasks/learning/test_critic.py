"""The critic's values against the body's own forward pass, and its tensors."""

import pytest
import torch

from tasks.learning.batching import collate
from tasks.learning.config import TrainerConfig
from tasks.learning.critic import Critic
from tasks.learning.policy import Policy
from tasks.learning.trained_model import PolicyError
from tests.tasks.learning.tiny_model import VOCABULARY, write_model

CPU = TrainerConfig(device="cpu")


@pytest.fixture
def critic(model):
    return Critic.of_policy(*model, CPU)


def with_random_head(critic):
    with torch.no_grad():
        critic.module.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
        critic.module.value_head.bias.fill_(0.25)
    return critic


def test_a_new_critic_expects_nothing(critic, batch):
    values = critic.values(batch)
    assert values.shape == batch.completion_ids.shape
    assert not values.any()


@pytest.mark.parametrize("tied", [True, False])
def test_values_are_those_of_the_body_before_each_token(tmp_path, ragged, tied):
    tensors = write_model(tmp_path, tied=tied)
    batch = collate(*ragged())
    critic = with_random_head(Critic.of_policy(tmp_path, tensors, CPU))
    body = Policy(tmp_path, tensors, CPU).module.base_model
    values = critic.values(batch)
    for row, (ids, start, length) in enumerate(
        zip(batch.input_ids, batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)
    ):
        hidden = body(input_ids=ids[None, : start + length]).last_hidden_state[0, start - 1 : start + length - 1]
        expected = critic.module.value_head(hidden)[:, 0]
        torch.testing.assert_close(values[row, :length], expected, rtol=0, atol=1e-5)
        assert not values[row, length:].any()


def test_its_tensors_make_it_again(critic, model, batch):
    with_random_head(critic)
    again = Critic(model[0], {name: tensor.clone() for name, tensor in critic.tensors().items()}, CPU)
    assert torch.equal(again.values(batch), critic.values(batch))
    assert {"value_head.weight", "value_head.bias"} < set(critic.tensors())


def test_body_and_head_are_both_trained(critic, batch):
    with_random_head(critic)
    critic.values(batch).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in critic.parameters().values())


def test_bfloat16_computes_in_it_and_says_float32(model, batch):
    critic = with_random_head(Critic.of_policy(*model, TrainerConfig(device="cpu", dtype="bfloat16")))
    exact = with_random_head(Critic.of_policy(*model, CPU))
    assert critic.values(batch).dtype == torch.float32
    torch.testing.assert_close(critic.values(batch), exact.values(batch), rtol=0.1, atol=0.3)
    assert not torch.equal(critic.values(batch), exact.values(batch))


def test_activations_are_recomputed_when_asked_for(model, batch):
    critic = with_random_head(Critic.of_policy(*model, TrainerConfig(device="cpu", gradient_checkpointing=True)))
    plain = with_random_head(Critic.of_policy(*model, CPU))
    assert critic.module.model.is_gradient_checkpointing
    for each in (critic, plain):
        each.values(batch).square().sum().backward()
    for name, parameter in plain.parameters().items():
        torch.testing.assert_close(critic.parameters()[name].grad, parameter.grad, rtol=1e-5, atol=1e-6)


def test_tensors_of_another_model_are_refused(critic, model):
    tensors = dict(critic.tensors())
    del tensors["value_head.bias"]
    with pytest.raises(PolicyError, match=r"missing 'value_head\.bias'"):
        Critic(model[0], tensors, CPU)
    wider = critic.tensors() | {"model.embed_tokens.weight": torch.zeros(VOCABULARY + 1, 32)}
    with pytest.raises(PolicyError, match=r"embed_tokens.weight': shape \(49, 32\); allowed: \(48, 32\)"):
        Critic(model[0], wider, CPU)
