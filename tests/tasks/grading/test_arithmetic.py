from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.data import ArithmeticConfig
from tasks.grading.arithmetic import ArithmeticReward
from tasks.grading.reward import GradingCase, RewardOutcome
from tasks.prompts.arithmetic import ALPHABET, ArithmeticPrompts

PROMPTS = ArithmeticPrompts(1000, 0, ArithmeticConfig())


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
