import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.learning.advantage import frac_reward_zero_std, group_advantages


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
