import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning.advantage import (
    advantages_of,
    constant_groups,
    frac_reward_zero_std,
    group_advantages,
    leave_one_out_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)

REWARDS = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), min_size=1, max_size=5)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_hand_computed_groups():
    rewards = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0, 6.0], dtype=torch.float64)
    # Means 2 and 2; unbiased deviations 1 and sqrt(12).
    expected = torch.tensor([-1.0, 0.0, 1.0, -2 / 12**0.5, -2 / 12**0.5, 4 / 12**0.5], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(rewards, 3, "group", 0.0), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(
        group_advantages(rewards, 3, "none", 0.0), torch.tensor([-1.0, 0, 1, -2, -2, 4], dtype=torch.float64)
    )
    assert group_advantages(torch.tensor([0.0, 1.0]).double(), 2, "group", 1.0).tolist() == pytest.approx(
        [-0.5 / (0.5**0.5 + 1), 0.5 / (0.5**0.5 + 1)], abs=1e-15
    )


def test_flat_and_grouped_rewards_agree():
    rewards = torch.rand(4, 8, dtype=torch.float64)
    grouped = group_advantages(rewards, 8, "group", 1e-6)
    assert grouped.shape == (4, 8)
    assert torch.equal(group_advantages(rewards.flatten(), 8, "group", 1e-6), grouped.flatten())
    assert torch.equal(group_advantages(rewards[0], 8, "group", 1e-6), grouped[0])


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7e6])
@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_group_of_equal_rewards_gets_exact_zeros(value, scale):
    rewards = torch.tensor([value] * 7 + [0.0, 1.0] * 3 + [0.5], dtype=torch.float64)
    advantages = group_advantages(rewards, 7, scale, 0.0)
    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[7:].abs().min() >= 0
    assert frac_reward_zero_std(rewards, 7) == 0.5


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), min_size=1, max_size=5),
    st.sampled_from(["group", "none"]),
)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards, scale):
    tensor = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(tensor, 4, scale, 1e-6)
    assert advantages.sum(dim=1).abs().max() < 1e-9 * max(1.0, float(tensor.abs().max()) / 1e-6)
    order = tensor.argsort(dim=1, stable=True)
    assert (advantages.gather(1, order).diff(dim=1) >= 0).all()


@pytest.mark.parametrize(
    ("rewards", "count", "message"),
    [
        (torch.zeros(5), 2, r"rewards: shape \(5,\)"),
        (torch.zeros(2, 3), 2, r"rewards: shape \(2, 3\)"),
        (torch.zeros(0), 2, "rewards: shape"),
        (torch.zeros(4), 1, "num_generations: value 1"),
        (torch.tensor([0.0, 1.0, float("nan"), 0.0]), 2, "rewards: value nan at 2"),
    ],
)
def test_refuses_rewards_that_are_not_whole_finite_groups(rewards, count, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, count, "group", 1e-6)


def test_batch_scaling_by_hand():
    rewards = f64([[1.0, 3.0], [0.0, 0.0]])
    # Deviation of all four around their mean 1: sqrt((0 + 4 + 1 + 1) / 3).
    expected = f64([[-1.0, 1.0], [0.0, 0.0]]) / 2**0.5
    torch.testing.assert_close(group_advantages(rewards, 2, "batch", 0.0), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(
        group_advantages(rewards, 2, "batch", 0.5), expected * 2**0.5 / (2**0.5 + 0.5), rtol=0, atol=1e-15
    )
    assert group_advantages(torch.ones(2, 2), 2, "batch", 0.0).tolist() == [[0.0, 0.0]] * 2


@given(REWARDS)
def test_batch_scaling_is_no_scaling_over_one_deviation(rewards):
    tensor = f64(rewards)
    expected = group_advantages(tensor, 4, "none", 0.0) / (tensor.std() + 1e-3)
    torch.testing.assert_close(group_advantages(tensor, 4, "batch", 1e-3), expected, rtol=1e-12, atol=1e-12)


@given(REWARDS)
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards):
    tensor = f64(rewards)
    others = torch.stack([tensor[:, [j for j in range(4) if j != i]].mean(dim=1) for i in range(4)], dim=1)
    torch.testing.assert_close(leave_one_out_advantages(tensor, 4), tensor - others, rtol=1e-12, atol=1e-9)
    assert leave_one_out_advantages(tensor.flatten(), 4).shape == (tensor.numel(),)


def test_leave_one_out_by_hand():
    assert leave_one_out_advantages(f64([1.0, 2.0, 6.0]), 3).tolist() == pytest.approx([-3.0, -1.5, 4.5], abs=1e-15)
    assert leave_one_out_advantages(f64([0.1] * 7), 7).tolist() == [0.0] * 7
    with pytest.raises(ValueError, match="num_generations: value 1"):
        leave_one_out_advantages(torch.zeros(4), 1)


def test_reinforce_plus_plus_by_hand():
    mask = torch.tensor([[True, True], [True, False]])
    # Rewards to go 0.5 * 2 - 1 = 0, 2 and 4: over tokens mean 2, deviation sqrt((4 + 0 + 4) / 2) = 2.
    advantages, returns = reinforce_plus_plus_advantages(f64([[-1.0, 2.0], [4.0, 9.0]]), mask, 0.5, 0.0)
    assert returns.tolist() == [[0.0, 2.0], [4.0, 0.0]]
    assert advantages.tolist() == [[-1.0, 0.0], [1.0, 0.0]]


def test_reinforce_plus_plus_of_one_number_per_response_counts_each_once():
    rewards = f64([0.0, 1.0, 1.0, 4.0])
    advantages, _ = reinforce_plus_plus_advantages(rewards[:, None], torch.ones(4, 1, dtype=torch.bool), 1.0, 1e-6)
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    torch.testing.assert_close(advantages[:, 0], expected, rtol=0, atol=1e-15)


@given(REWARDS, st.lists(st.integers(1, 9), min_size=20, max_size=20))
def test_reinforce_plus_plus_baseline_is_normalised_over_tokens_and_centred_in_groups(rewards, lengths):
    tensor = f64(rewards)
    counts = torch.tensor(lengths[: tensor.numel()]).reshape(tensor.shape)
    advantages = reinforce_plus_plus_baseline_advantages(tensor, counts, 4, 1e-3)
    centred = (tensor - tensor.mean(dim=1, keepdim=True)).flatten()
    tokens = centred.repeat_interleave(counts.flatten())
    expected = (centred - tokens.mean()) / (tokens.std() + 1e-3)
    torch.testing.assert_close(advantages.flatten(), expected, rtol=1e-8, atol=1e-8)


def test_constant_groups_are_those_that_teach_nothing():
    rewards = f64([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    assert constant_groups(rewards, 2).tolist() == [True, False, True]
    assert frac_reward_zero_std(rewards, 2) == pytest.approx(2 / 3)


def test_the_configured_estimator_is_used():
    rewards, lengths = f64([[0.0, 1.0], [1.0, 5.0]]), torch.tensor([[1, 2], [3, 4]])
    cases = [
        (AlgorithmConfig(), group_advantages(rewards, 2, "group", 1e-6), False),
        (AlgorithmConfig(scale_rewards="batch"), group_advantages(rewards, 2, "batch", 1e-6), True),
        (AlgorithmConfig(advantage_estimator="rloo"), leave_one_out_advantages(rewards, 2), False),
        (
            AlgorithmConfig(advantage_estimator="reinforce_plus_plus_baseline", advantage_eps=0.1),
            reinforce_plus_plus_baseline_advantages(rewards, lengths, 2, 0.1),
            True,
        ),
    ]
    for algorithm, expected, whole in cases:
        found, returns = advantages_of(rewards.flatten(), lengths.flatten(), 2, algorithm)
        assert torch.equal(torch.stack(found), expected.flatten())
        assert returns is None
        assert algorithm.needs_whole_batch == whole


def test_advantages_of_responses_that_are_not_trained():
    """The second has no trained token; its reward counts in its group, and not in what is normalised over tokens."""
    rewards, lengths = f64([1.0, 0.0, 4.0, 2.0]), torch.tensor([2, 0, 1, 3])
    algorithm = AlgorithmConfig(advantage_estimator="reinforce_plus_plus_baseline", advantage_eps=0.0)
    tokens = f64([0.5, 0.5, 1.0, -1.0, -1.0, -1.0])
    expected = (f64([0.5, 1.0, -1.0]) - tokens.mean()) / tokens.std()
    found, _ = advantages_of(rewards, lengths, 2, algorithm)
    torch.testing.assert_close(torch.stack([found[0], *found[2:]]), expected)
    algorithm = AlgorithmConfig(advantage_estimator="reinforce_plus_plus", advantage_eps=0.0)
    tokens = f64([1.0, 1.0, 4.0, 2.0, 2.0, 2.0])
    found, _ = advantages_of(rewards, lengths, 2, algorithm)
    assert [len(row) for row in found] == [2, 0, 1, 3]
    torch.testing.assert_close(torch.cat(found), (tokens - tokens.mean()) / tokens.std())


@pytest.mark.parametrize("lengths", [[0, 0], [0, 1]])
def test_too_few_tokens_to_normalise_over_teach_nothing(lengths):
    for estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        algorithm = AlgorithmConfig(advantage_estimator=estimator)
        found, _ = advantages_of(f64([0.0, 1.0]), torch.tensor(lengths), 2, algorithm)
        assert not any(row.any() for row in found)
        assert [row.numel() for row in found] == (lengths if estimator == "reinforce_plus_plus" else [1, 1])


def test_the_kl_in_the_reward_is_taken_before_the_advantages():
    kl = [f64([0.5, 0.5]), f64([0.0]), f64([1.0, 1.0, 1.0]), f64([2.0])]
    rewards, lengths = f64([1.0, 0.0, 4.0, 2.0]), torch.tensor([2, 1, 3, 1])
    algorithm = AlgorithmConfig(advantage_estimator="rloo", kl_in="reward", kl_coef=0.5)
    expected = leave_one_out_advantages(f64([0.5, 0.0, 2.5, 1.0]), 2)
    assert torch.equal(torch.stack(advantages_of(rewards, lengths, 2, algorithm, kl=kl)[0]), expected)
    algorithm = AlgorithmConfig(advantage_estimator="reinforce_plus_plus", kl_in="reward", kl_coef=0.5, advantage_eps=0)
    tokens = f64([0.5, 0.75, 0.0, 2.5, 3.0, 3.5, 1.0])
    found = torch.cat(advantages_of(rewards, lengths, 2, algorithm, kl=kl)[0])
    torch.testing.assert_close(found, (tokens - tokens.mean()) / tokens.std())


def ppo(**fields):
    return AlgorithmConfig(advantage_estimator="gae", gae_lambda=0.9, gamma=0.98, advantage_eps=1e-6, **fields)


def test_ppo_advantages_are_gae_of_the_trained_responses_normalised_over_their_tokens():
    algorithm = ppo(kl_coef=0.1, kl_in="reward")
    rewards = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
    lengths = torch.tensor([3, 0, 2])
    values = [torch.tensor([0.1, 0.2, 0.4]), torch.zeros(0), torch.tensor([0.3, -0.1])]
    kl = [torch.tensor([0.01, 0.02, 0.03]), torch.tensor([9.0] * 5), torch.tensor([0.2, 0.1])]
    penalties_of = [row.double() for row in kl]
    advantages, returns = advantages_of(rewards, lengths, 3, algorithm, kl=penalties_of, values=values)
    expected = []
    for index in (0, 2):
        penalties, value = kl[index].tolist(), [*values[index].tolist(), 0.0]
        token_rewards = [-0.1 * penalty for penalty in penalties]
        token_rewards[-1] += float(rewards[index])
        running, row = 0.0, []
        for t in reversed(range(len(token_rewards))):
            delta = token_rewards[t] + 0.98 * value[t + 1] - value[t]
            running = delta + 0.98 * 0.9 * running
            row.append(running)
        expected.append(row[::-1])
    everything = [each for row in expected for each in row]
    mean, spread = statistics.mean(everything), statistics.stdev(everything)
    for index, row in zip((0, 2), expected, strict=True):
        normal = [(each - mean) / (spread + 1e-6) for each in row]
        assert advantages[index].tolist() == pytest.approx(normal, abs=1e-6)
        assert returns[index].tolist() == pytest.approx(
            [a + v for a, v in zip(row, values[index].tolist(), strict=True)], abs=1e-6
        )
    assert len(advantages[1]) == len(returns[1]) == 0


@pytest.mark.parametrize("lengths", [(0, 0), (1, 0)])
def test_ppo_has_no_advantages_where_there_is_nothing_to_normalise_over(lengths):
    """The critic learns from a single token all the same."""
    values = [torch.zeros(length) for length in lengths]
    advantages, returns = advantages_of(torch.ones(2).double(), torch.tensor(lengths), 2, ppo(), values=values)
    assert [len(row) for row in advantages] == [len(row) for row in returns] == list(lengths)
    assert not any(row.any() for row in advantages)
    assert all(row.tolist() == [1.0] * len(row) for row in returns)


def own(name, **fields):
    return AlgorithmConfig(advantage_estimator=f"tests.own_estimators:{name}", **fields)


def test_a_function_of_the_users_own_sees_one_group_or_the_whole_step():
    rewards, lengths = f64([0.0, 1.0, 2.0, 5.0]), torch.tensor([1, 3, 2, 2])
    by_group = [-0.5, 0.5, -1.5, 1.5]
    for name in ("mean_baseline", "batch_baseline"):
        found, returns = advantages_of(rewards, lengths, 2, own(name))
        assert torch.stack(found).tolist() == by_group
        assert returns is None
    found, _ = advantages_of(rewards, lengths, 2, own("batch_baseline", advantage_scope="batch"))
    assert torch.stack(found).tolist() == [-2.0, -1.0, 0.0, 3.0]
    found, _ = advantages_of(rewards, lengths, 2, own("per_token_of_the_group"))
    assert torch.stack(found).tolist() == [0.0, 0.25, 0.5, 1.25]


def test_a_function_of_the_users_own_gets_rewards_less_the_kl_and_its_advantages_have_no_gradient():
    kl = [f64([0.5, 0.5]), f64([0.0])]
    algorithm = own("with_a_gradient", kl_in="reward", kl_coef=0.5)
    found, _ = advantages_of(f64([1.0, 2.0]), torch.tensor([2, 1]), 2, algorithm, kl=kl)
    assert [row.item() for row in found] == [0.5, 2.0]
    assert all(row.dtype == torch.float64 and not row.requires_grad for row in found)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_number", r"returned torch\.float64 \(\); allowed: a tensor of floating numbers \(1, 2\)"),
        ("integers", r"returned torch\.int64 \(1, 2\); allowed: a tensor of floating numbers"),
        ("a_list", "returned a list; allowed: a tensor of floating numbers"),
        ("not_finite", "returned inf; allowed: finite numbers"),
    ],
)
def test_what_an_own_function_returns_is_verified(name, message):
    with pytest.raises(ValueError, match=f"^algorithm.advantage_estimator: 'tests.own_estimators:{name}' {message}"):
        advantages_of(f64([1.0, 2.0]), torch.tensor([2, 1]), 2, own(name))
