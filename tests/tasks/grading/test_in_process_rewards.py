"""The rewards without a worker process: arithmetic, environment and length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.data import ArithmeticConfig
from tasks.configuration.rewards import RewardConfig
from tasks.grading.grader import Grader
from tasks.grading.in_process_rewards import ArithmeticReward, LengthReward, length_penalty
from tasks.grading.isolation import IsolatedReward
from tasks.grading.reward import GradedConversation, GradingCase, RewardOutcome
from tasks.prompts.arithmetic import ALPHABET, ArithmeticPrompts

PROMPTS = ArithmeticPrompts(1000, 0, ArithmeticConfig())
SPOKEN = [{"role": "user", "content": "4?"}, {"role": "assistant", "content": "4"}]


def grade(index: int, completion: str) -> RewardOutcome:
    prompt = PROMPTS[index]
    assert isinstance(prompt.text_or_messages, str)
    case = GradingCase(0, prompt.text_or_messages, completion, (), prompt.columns)
    return ArithmeticReward().grade([case])[0]


@given(index=st.integers(0, 999))
def test_the_worked_answer_of_the_generator_is_right(index: int):
    assert grade(index, PROMPTS[index].columns["worked"]) == RewardOutcome(1.0)


@given(index=st.integers(0, 999), data=st.data())
def test_one_changed_character_is_wrong(index: int, data: st.DataObject):
    worked = PROMPTS[index].columns["worked"]
    place = data.draw(st.integers(0, len(worked) - 1))
    other = data.draw(st.sampled_from(ALPHABET).filter(lambda letter: letter != worked[place]))
    assert grade(index, worked[:place] + other + worked[place + 1 :]) == RewardOutcome(0.0)


@given(index=st.integers(0, 999), data=st.data())
def test_one_missing_or_added_character_is_wrong(index: int, data: st.DataObject):
    worked = PROMPTS[index].columns["worked"]
    place = data.draw(st.integers(0, len(worked) - 1))
    assert grade(index, worked[:place] + worked[place + 1 :]) == RewardOutcome(0.0)
    assert grade(index, worked[:place] + data.draw(st.sampled_from(ALPHABET)) + worked[place:]) == RewardOutcome(0.0)


def test_the_answer_alone_is_wrong():
    assert grade(0, "#" + PROMPTS[0].columns["answer"]) == RewardOutcome(0.0)


def case(response: int, reward: float | None) -> GradingCase:
    return GradingCase(response, SPOKEN[:1], "4", (5,), {}, GradedConversation(SPOKEN, 1, 1, reward))


def test_the_environments_reward_is_the_responses_and_none_does_not_apply():
    penalty = RewardConfig(function="length", arguments={"free_tokens": 0, "scale_tokens": 4})
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


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (100, 0.0), (101, -0.02), (125, -0.5), (150, -1.0), (9000, -1.0)]
)
def test_it_falls_from_the_free_length_on_and_ends_at_minus_one(tokens: int, penalty: float):
    assert length_penalty(tokens, 100, 50) == penalty


@given(st.integers(0, 10_000), st.integers(0, 1000), st.integers(1, 1000))
def test_longer_is_never_better(tokens: int, free_tokens: int, scale_tokens: int):
    here, there = (length_penalty(number, free_tokens, scale_tokens) for number in (tokens, tokens + 1))
    assert -1.0 <= there <= here <= 0.0


def test_tokens_count_and_not_characters():
    cases = [GradingCase(0, "p", "x" * 99, (5, 6, 7), {}), GradingCase(1, "p", "", (5, 2), {})]
    assert LengthReward("brief", 2, 4).grade(cases) == [RewardOutcome(-0.25), RewardOutcome(0.0)]
