"""Advantages for people, from what is recorded."""

import pytest
import torch

from storage.records.records import GradedResponse
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.run_config import dump, parse
from tasks.learning.advantage import group_advantages
from tasks.learning.estimates import length_penalties
from tasks.learning.recorded_advantages import recorded_advantages
from tests.journals import a_plan
from tests.viewed_run import CONFIG

REWARDS = [0.0, 1.0, 0.25, 0.25, 0.5, 0.0]


def graded(number, reward, **changes):
    fields = {"response": number, "length": 4, "finish_reason": "stop", "lineage": (), "reward": reward, "rewards": {}}
    given = fields | changes
    return GradedResponse(**({"policy_length": given["length"]} | given))


def plan(**algorithm):
    config = CONFIG | {"algorithm": algorithm} if algorithm else CONFIG
    return a_plan(groups=3, generations=2, config=dump(parse(config)))


def test_they_are_those_of_the_train_step_in_whatever_order_they_were_recorded():
    responses = [graded(number, reward) for number, reward in enumerate(REWARDS)]
    found = recorded_advantages(plan(), responses[4:] + responses[:4])
    algorithm = parse(plan().config).algorithm
    expected = group_advantages(
        torch.tensor(REWARDS, dtype=torch.float64), 2, algorithm.scale_rewards, algorithm.advantage_eps
    )
    assert found == dict(enumerate(expected.tolist()))
    assert found[2] == found[3] == 0.0


def test_the_penalty_of_long_responses_counts():
    settings = {"overlong_buffer_length": 8}
    responses = [graded(0, 1.0), graded(1, 1.0, length=16, finish_reason="length")]
    assert recorded_advantages(plan(), responses) == {0: 0.0, 1: 0.0}
    found = recorded_advantages(plan(**settings), responses)
    assert found[0] == pytest.approx(-found[1])
    assert found[0] > 0


def test_the_penalty_counts_observations_as_the_limit_does():
    """Of the first response's 16 tokens, which are the limit, the policy sampled 3; of the second's 9, all."""
    responses = [graded(0, 1.0, length=16, policy_length=3, finish_reason="length"), graded(1, 1.0, length=9)]
    algorithm = AlgorithmConfig(overlong_buffer_length=8)
    assert length_penalties(responses, algorithm, plan().sampling).tolist() == [-1.0, -1 / 8]
    found = recorded_advantages(plan(overlong_buffer_length=8), responses)
    assert found[0] < 0 < found[1]


@pytest.mark.parametrize(
    "algorithm", [{"advantage_estimator": "reinforce_plus_plus"}, {"advantage_estimator": "gae"}], ids=str
)
def test_numbers_for_each_token_are_not_made_one(algorithm):
    assert recorded_advantages(plan(**algorithm), [graded(0, 1.0), graded(1, 0.0)]) is None


def test_without_trained_responses_there_are_none():
    assert recorded_advantages(plan(), []) is None
