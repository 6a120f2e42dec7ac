"""The critic's values against the body's own forward pass, and its tensors."""

import pytest
import torch

from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import collate
from tasks.learning.critic import Critic, ValueTotals, accumulate_values, apply_values
from tasks.learning.optimizer import NonFiniteGradient, PolicyOptimizer
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
        zip(batch.input_ids, batch.prompt_lengths, batch.lengths.tolist(), strict=True)
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


@pytest.fixture
def new_critic(model):
    def make():
        critic = Critic.of_policy(*model, TrainerConfig(device="cpu"))
        critic.module.double()
        with torch.no_grad():
            critic.module.value_head.weight.normal_(generator=torch.Generator().manual_seed(2))
        return critic

    return make


def targets(batch, seed=3):
    generator = torch.Generator().manual_seed(seed)
    shape = batch.completion_ids.shape
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_the_gradient_is_that_of_the_mean_over_tokens(new_critic, batch, value_clip):
    critic, plain = new_critic(), new_critic()
    old, returns = targets(batch)
    totals = accumulate_values(critic, batch, old, returns, value_clip)
    losses = []
    values = plain.values(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        for v, o, r in zip(values[row, :length], old[row], returns[row], strict=False):
            loss = (v - r) ** 2
            if value_clip is not None:
                loss = torch.maximum(loss, (o + (v - o).clamp(-value_clip, value_clip) - r) ** 2)
            losses.append(loss / 2)
    torch.stack(losses).mean().backward()
    count = int(batch.lengths.sum())
    assert (totals.tokens, len(losses)) == (count, count)
    assert totals.metrics()["critic/vf_loss"] == pytest.approx(float(torch.stack(losses).mean().detach()), rel=1e-12)
    for name, parameter in plain.parameters().items():
        # The model's norms compute in float32.
        actual = critic.parameters()[name].grad / count
        torch.testing.assert_close(actual, parameter.grad, rtol=1e-4, atol=1e-5)


def test_parts_add_up_to_the_whole(new_critic, ragged):
    ids, prompts, completions, logprobs = ragged()
    whole, parts = new_critic(), new_critic()
    batch = collate(ids, prompts, completions, logprobs)
    old, returns = targets(batch)
    together = accumulate_values(whole, batch, old, returns, 0.2)
    totals = ValueTotals()
    for start in (0, 2, 4):
        rows = slice(start, start + 2)
        part = collate(ids[rows], prompts[rows], completions[rows], logprobs[rows])
        width = part.completion_ids.shape[1]
        totals += accumulate_values(parts, part, old[rows, :width], returns[rows, :width], 0.2)
    assert totals.metrics() == pytest.approx(together.metrics(), rel=1e-9)
    for name, parameter in whole.parameters().items():
        torch.testing.assert_close(parts.parameters()[name].grad, parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_step_brings_values_nearer_to_returns_and_says_how_well_they_explain_them(new_critic, batch):
    critic = new_critic()
    optimizer = PolicyOptimizer(critic.parameters(), OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9))
    _, returns = targets(batch)
    losses, explained = [], []
    for _ in range(20):
        old = critic.values(batch).detach()
        metrics = apply_values(optimizer, accumulate_values(critic, batch, old, returns, None), batch.responses)
        losses.append(metrics["critic/vf_loss"])
        explained.append(metrics["critic/vf_explained_var"])
    assert losses[-1] < 0.5 * losses[0]
    assert explained[0] < explained[-1] <= 1
    assert (metrics["critic/lr"], metrics["critic/vf_clipfrac"]) == (1e-2, 0.0)


def test_values_count_as_clipped_where_the_clipped_loss_is_the_larger(new_critic, batch):
    """The first value of each response has come too far, and the second just as far, but away from its return."""
    critic = new_critic()
    values = critic.values(batch).detach()
    columns = torch.arange(values.shape[1])
    old = torch.where(columns < 2, values + 0.3, values + 0.1)
    returns = torch.where(columns == 1, values + 9.0, values)
    totals = accumulate_values(critic, batch, old, returns, 0.2)
    assert totals.clipped == len(batch.responses)


def test_what_explains_the_variance_are_the_values_before_the_step(new_critic, batch):
    critic = new_critic()
    old, returns = targets(batch)
    assert accumulate_values(critic, batch, returns, returns, None).metrics()["critic/vf_explained_var"] == 1.0
    assert accumulate_values(critic, batch, old, returns, None).metrics()["critic/vf_explained_var"] < 0.5
    equal = torch.full_like(returns, 0.1)
    assert accumulate_values(critic, batch, old, equal, None).metrics()["critic/vf_explained_var"] == 0.0


def test_a_loss_that_is_not_finite_names_its_responses_and_leaves_no_gradient(new_critic, batch):
    critic = new_critic()
    old, returns = targets(batch)
    returns[1, 0] = float("nan")
    with pytest.raises(NonFiniteGradient, match=r"non-finite loss of the critic; responses 1$"):
        accumulate_values(critic, batch, old, returns, None)
    assert all(parameter.grad is None for parameter in critic.parameters().values())
