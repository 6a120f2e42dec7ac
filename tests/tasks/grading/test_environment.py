import pytest

from tasks.configuration.rewards import RewardConfig
from tasks.grading.grader import Grader
from tasks.grading.isolation import IsolatedReward
from tasks.grading.reward import GradedConversation, GradingCase

SPOKEN = [{"role": "user", "content": "4?"}, {"role": "assistant", "content": "4"}]


def case(response: int, reward: float | None) -> GradingCase:
    return GradingCase(response, SPOKEN[:1], "4", (5,), {}, GradedConversation(SPOKEN, 1, 1, reward))


def test_the_environments_reward_is_the_responses_and_none_does_not_apply():
    penalty = RewardConfig(function="length", free_tokens=0, scale_tokens=4)
    with Grader([RewardConfig(function="environment", weight=2.0), penalty]) as grader:
        first, second = grader.grade([case(0, 0.75), case(1, None)])
    assert (first.values["environment"], first.reward) == (0.75, 1.5 - 0.25)
    assert (second.values["environment"], second.reward) == (None, -0.25)


def test_a_conversation_reaches_the_process_of_a_function():
    reward = IsolatedReward("r", "tests.reward_functions:messages_seen", 30.0, 60.0)
    try:
        [found, plain] = reward.grade([case(0, None), GradingCase(1, SPOKEN[:1], "4", (5,), {})])
    finally:
        reward.close()
    assert (found.value, plain.value) == pytest.approx((2.0, 0.0))
