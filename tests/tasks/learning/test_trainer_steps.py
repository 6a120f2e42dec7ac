"""Several optimizer steps in an iteration, and PPO with its critic, against loops written out by hand."""

import pytest
import torch

from storage.clock import ManualClock
from storage.stores.memory import MemoryStore
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.grading.grader import Grader
from tasks.learning.advantage import group_advantages
from tasks.learning.batching import collate
from tasks.learning.critic import Critic
from tasks.learning.learner import CriticLearner, Learner
from tasks.learning.optimizer import NonFiniteGradient, PolicyOptimizer
from tasks.learning.trainer import step_metrics
from tests.covering import covering
from tests.graded_trainer import graded_trainer
from tests.journals import LOGPROB
from tests.tasks.learning.test_trainer_algorithms import (
    COUNT,
    EVEN,
    GENERATIONS,
    GROUPS,
    LENGTHS,
    PLAN,
    PROMPTS,
    REWARDS,
    completion,
    journal,
    same,
)

RATES = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9)
CPU = TrainerConfig(device="cpu")


def train(learner, algorithm, *, plan=PLAN, tokens_max=40):
    with Grader(EVEN) as grader:
        return graded_trainer(
            journal(MemoryStore()),
            plan,
            prompts=PROMPTS,
            learner=learner,
            grader=grader,
            decode=lambda ids: "x" * len(ids),
            algorithm=algorithm,
            trainer=TrainerConfig(micro_batch_tokens_max=tokens_max, group_timeout_s=5.0),
            clock=ManualClock(),
        ).step()


@pytest.fixture
def learner(build):
    def new(critic=None):
        policy = build(double=True)
        return Learner(policy, PolicyOptimizer(policy.parameters(), RATES), None, critic)

    return new


@pytest.fixture
def critic(model):
    def new(warmup_iterations=0):
        critic = Critic.of_policy(*model, CPU)
        critic.module.double()
        return CriticLearner(critic, PolicyOptimizer(critic.parameters(), RATES), warmup_iterations)

    return new


def batch_of(responses):
    prompts = [list(PROMPTS[response // GENERATIONS].token_ids) for response in responses]
    tokens = [completion(response) for response in responses]
    return collate(responses, prompts, tokens, [[LOGPROB] * len(row) for row in tokens])


def by_hand(policy, epochs, parts, *, sampler=False):
    """Clipped GRPO with token-mean, step by step; the log-probs before the first step are the denominator."""
    optimizer = PolicyOptimizer(policy.parameters(), RATES)
    advantages = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), GENERATIONS, "group", 1e-6).float()
    with torch.no_grad():
        old = policy.logprobs(batch_of(range(COUNT)), 1.0)[0].float()
    ratios = []
    for _ in range(epochs):
        for groups in parts:
            members = [group * GENERATIONS + member for group in groups for member in range(GENERATIONS)]
            batch = batch_of(members)
            logprobs = policy.logprobs(batch, 1.0)[0]
            width = logprobs.shape[1]
            before = torch.full_like(logprobs, LOGPROB) if sampler else old[members, :width].double()
            if not ratios and not sampler:
                before = logprobs.detach()
            ratio = (logprobs - before).exp()
            advantage = advantages[members][:, None].double()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            loss.masked_fill(~batch.response_mask, 0.0).sum().backward()
            ratios.append(float(ratio.detach()[batch.response_mask].max()))
            optimizer.step(float(batch.response_mask.sum()))
    return ratios


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divided", "sampler", "tokens_max"),
    covering(
        [(3, 1, [range(GROUPS)]), (1, 2, [(0, 1), (2, 3)]), (2, 3, [(0,), (1,), (2, 3)])], [False, True], [1, 1000]
    ),
)
def test_steps_are_those_of_a_loop_written_out(build, learner, divided, sampler, tokens_max):
    epochs, count, parts = divided
    algorithm = AlgorithmConfig(
        num_epochs=epochs, num_mini_batches=count, old_logprobs="sampler" if sampler else "trainer"
    )
    actual, expected = learner(), build(double=True)
    metrics = train(actual, algorithm, tokens_max=tokens_max).metrics
    ratios = by_hand(expected, epochs, parts, sampler=sampler)
    assert actual.optimizer.steps == epochs * count == len(ratios)
    assert metrics["num_tokens"] == sum(LENGTHS)
    assert metrics["ratio_max"] == pytest.approx(max(ratios), rel=1e-3)
    assert max(abs(ratio - 1) for ratio in ratios[1:]) > 1e-3
    for name, tensor in expected.tensors(torch.float64).items():
        torch.testing.assert_close(actual.policy.tensors(torch.float64)[name], tensor, rtol=0, atol=2e-5)


def test_more_mini_batches_than_groups_are_as_many_as_groups(learner):
    actual = learner()
    train(actual, AlgorithmConfig(num_mini_batches=99))
    assert actual.optimizer.steps == GROUPS


@pytest.mark.slow
def test_mismatch_is_measured_before_the_first_step_whatever_the_later_ones_do(learner):
    once, often = learner(), learner()
    mismatch = [
        train(each, AlgorithmConfig(num_epochs=epochs)).metrics["mismatch_kl"]
        for each, epochs in ((once, 1), (often, 4))
    ]
    assert mismatch[1] == pytest.approx(mismatch[0], rel=1e-5)


PPO = AlgorithmConfig(advantage_estimator="gae", value_clip=0.2, gae_lambda=0.9)


@pytest.mark.slow
def test_ppo_trains_policy_and_critic_to_their_targets(learner, critic):
    """With values of zero and lambda 1, returns are the rewards, and advantages are these, normalised over tokens."""
    value = critic()
    actual = learner(value)
    before = {name: tensor.clone() for name, tensor in value.critic.tensors().items()}
    metrics = train(actual, AlgorithmConfig(advantage_estimator="gae", gae_lambda=1.0)).metrics
    tokens = sum(LENGTHS)
    rewards = [reward for reward, length in zip(REWARDS, LENGTHS, strict=True) for _ in range(length)]
    assert metrics["critic/returns/mean"] == pytest.approx(sum(rewards) / tokens)
    assert metrics["critic/vf_loss"] == pytest.approx(sum(reward**2 for reward in rewards) / 2 / tokens)
    assert (metrics["critic/vpred_mean"], metrics["critic/lr"]) == (0.0, 1e-2)
    assert metrics["actor/grad_norm"] > 0
    assert (actual.optimizer.steps, value.optimizer.steps) == (1, 1)
    assert not same(before, value.critic.tensors())
    train(actual, AlgorithmConfig(advantage_estimator="gae", gae_lambda=1.0))
    assert value.critic.values(batch_of(range(COUNT))).detach().abs().max() > 0


@pytest.mark.slow
def test_a_critic_learns_what_is_to_be_expected(learner, critic):
    value = critic()
    actual = learner(value)
    algorithm = AlgorithmConfig(advantage_estimator="gae", num_epochs=8)
    losses = [train(actual, algorithm).metrics["critic/vf_loss"] for _ in range(6)]
    assert losses[-1] < 0.4 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_while_the_critic_warms_up_the_policy_stays(learner, critic, epochs):
    value = critic(warmup_iterations=1)
    actual = learner(value)
    before = {name: tensor.clone() for name, tensor in actual.policy.tensors().items()}
    metrics = train(actual, AlgorithmConfig(advantage_estimator="gae", num_epochs=epochs)).metrics
    assert same(before, actual.policy.tensors())
    assert (actual.optimizer.steps, value.optimizer.steps) == (0, epochs)
    assert "actor/grad_norm" not in metrics
    assert metrics["critic/vf_loss"] > 0


def test_ppo_without_a_critic_and_a_critic_without_ppo_are_refused(learner, critic):
    with pytest.raises(ValueError, match="advantage_estimator: value 'gae'; allowed: others without a critic"):
        train(learner(), PPO)
    with pytest.raises(ValueError, match="critic: one is given; allowed: none"):
        train(learner(critic()), AlgorithmConfig(num_epochs=2))


def test_a_value_that_is_not_finite_is_told_of_its_own_response(learner, critic):
    """Normalisation over the step spreads it to all of them."""
    value = critic()
    with torch.no_grad():
        # The token is in one completion only.
        odd = next(t for t in completion(9) if sum(t in completion(r) for r in range(COUNT)) == 1)
        position = completion(9).index(odd)
        value.critic.module.value_head.weight.fill_(1.0)
        value.critic.module.model.embed_tokens.weight[odd] = float("nan")
    assert position < LENGTHS[9] - 1
    with pytest.raises(NonFiniteGradient, match=r"non-finite value of the critic; responses 9$"):
        train(learner(value), PPO)


def test_a_mini_batch_that_is_not_trained_is_not_in_the_means():
    steps = [
        {"entropy": 2.0, "num_tokens": 30.0, "importance/ratio_min": 0.9},
        {"entropy": 1.0, "num_tokens": 10.0, "importance/ratio_min": 0.8},
        {"entropy": 0.0, "num_tokens": 0.0, "importance/ratio_min": 0.0},
    ]
    assert step_metrics(steps, 1) == {"entropy": 1.75, "num_tokens": 40.0, "importance/ratio_min": 0.8}
    assert step_metrics(steps[2:], 1) == steps[2]


def test_metrics_of_steps_are_means_but_for_counts_bounds_and_rates():
    steps = [
        {"loss": 1.0, "num_tokens": 10.0, "ratio_max": 3.0, "actor/lr": 0.1},
        {"loss": 3.0, "num_tokens": 20.0, "ratio_max": 2.0, "actor/lr": 0.2, "critic/vf_loss": 5.0},
    ]
    assert step_metrics(steps, 2) == {
        "loss": pytest.approx(7 / 3),
        "num_tokens": 15.0,
        "ratio_max": 3.0,
        "actor/lr": 0.2,
        "critic/vf_loss": 5.0,
    }
