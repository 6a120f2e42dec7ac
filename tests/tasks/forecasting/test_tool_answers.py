import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.forecasting.scenario import ToolsScenario
from tasks.forecasting.tool_answers import tool_answers

LENGTHS = np.full((250, 8), 400, dtype=np.int64)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.floats(0, 40),
    st.integers(0, 5),
    st.integers(0, 1000),
)
def test_every_turn_has_a_token_and_a_response_ends_with_one_of_its_own(lengths, answers, most, seed):
    tools = ToolsScenario(answers=answers, answers_max=most, answer_s=2.0)
    found = tool_answers(tools, np.array([lengths]), seed, 3)
    assert len(found) == len(lengths)
    for length, of_response in zip(lengths, found, strict=True):
        places = [answer.at_tokens for answer in of_response]
        assert len(places) <= most
        assert places == sorted(set(places))
        assert all(0 < place < length for place in places)
        assert all(answer.wait_s > 0 for answer in of_response)


def test_means_are_what_was_asked_for_and_the_seed_decides():
    tools = ToolsScenario(answers=3.0, answer_s=2.0, sigma=0.8)
    found = tool_answers(tools, LENGTHS, 5, 1)
    waits_s = [answer.wait_s for of_response in found for answer in of_response]
    assert len(waits_s) / LENGTHS.size == pytest.approx(3.0, rel=0.05)
    assert np.mean(waits_s) == pytest.approx(2.0, rel=0.05)
    assert np.std(np.log(waits_s)) == pytest.approx(0.8, rel=0.05)
    assert np.mean([answer.at_tokens for each in found for answer in each]) == pytest.approx(200, rel=0.05)
    assert found == tool_answers(tools, LENGTHS, 5, 1)
    assert found != tool_answers(tools, LENGTHS, 6, 1)
    assert found != tool_answers(tools, LENGTHS, 5, 2)
