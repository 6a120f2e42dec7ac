"""Advantage estimators of tests, as a user writes them; the configuration names them as "tests.own_estimators:..."."""

import torch
from torch import Tensor

not_a_function = 3


def mean_baseline(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean(dim=1, keepdim=True)


def batch_baseline(rewards: Tensor) -> Tensor:
    return rewards - rewards.mean()


def counted_baseline(rewards: Tensor, counted: Tensor | None) -> Tensor:
    return rewards - (rewards if counted is None else rewards[counted]).mean()


def per_token_of_the_group(rewards: Tensor, lengths: Tensor, power: float = 1.0) -> Tensor:
    return rewards / lengths.sum(dim=1, keepdim=True) ** power


def with_a_gradient(rewards: Tensor) -> Tensor:
    return rewards.float() * torch.ones(1, requires_grad=True)


def of_something_else(scores: Tensor) -> Tensor:
    return scores


def of_anything(**tensors: Tensor) -> Tensor:
    return tensors["rewards"]


def of_too_much(rewards: Tensor, critic: Tensor) -> Tensor:
    return rewards + critic


def by_position(rewards: Tensor, /) -> Tensor:
    return rewards


def one_number(rewards: Tensor) -> Tensor:
    return rewards.mean()


def integers(rewards: Tensor) -> Tensor:
    return rewards.long()


def a_list(rewards: Tensor) -> list[list[float]]:
    return rewards.tolist()


def not_finite(rewards: Tensor) -> Tensor:
    return rewards / torch.zeros_like(rewards)
