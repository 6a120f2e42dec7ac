"""What an environment adds stands at the end of the user's last message, and a reset never sees it."""

import pytest

from tasks.prompts.openings import reset_columns, with_opening
from tasks.prompts.prompt import Prompt, PromptError

MESSAGES = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def test_the_opening_ends_the_last_message_of_the_user_and_the_row_stays_as_it_is():
    before = [dict(message) for message in MESSAGES]
    added = with_opening(Prompt("a", MESSAGES, {}), " more")
    assert [message["content"] for message in added] == ["one", "two", "three more", "four"]
    assert before == MESSAGES


def test_without_an_opening_nothing_changes():
    assert with_opening(Prompt("a", MESSAGES, {}), None) == MESSAGES
    assert with_opening(Prompt("a", "text", {}), None) == "text"


def test_a_prompt_without_a_message_of_the_user_is_refused_by_its_name():
    with pytest.raises(PromptError, match=r"^prompt 'a': no message is the user's; allowed with an environment"):
        with_opening(Prompt("a", [{"role": "system", "content": "x"}], {}), "more")


@pytest.mark.parametrize("opening", [None, "", "ee", " more"])
def test_a_reset_gets_the_row_as_the_data_has_it(opening):
    prompt = Prompt("a", MESSAGES, {"answer": 3})
    stored = with_opening(prompt, opening)
    assert reset_columns(stored, prompt.columns, opening) == {"prompt": MESSAGES, "answer": 3}
