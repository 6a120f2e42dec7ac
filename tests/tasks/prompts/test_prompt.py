import pytest

from tasks.prompts.prompt import PromptError, check_prompt


def test_text_and_messages_are_prompts():
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    assert check_prompt("2+2=", "row 0") == "2+2="
    assert check_prompt(messages, "row 0") == messages


def test_keys_that_arrow_filled_with_null_are_absent():
    assert check_prompt([{"role": "user", "content": "hi", "name": None}], "row 0") == [
        {"role": "user", "content": "hi"}
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "row 5: the prompt is of type int; allowed: text, or"),
        (None, "row 5: the prompt is missing"),
        ("", "row 5: the prompt is empty text"),
        ([], "row 5: the prompt is an empty list"),
        (["hi"], "row 5: message 0 is of type str; allowed"),
        (
            [{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}],
            "row 5: message 1 has the role 'robot'",
        ),
        ([{"from": "human", "value": "a"}], "row 5: message 0 has the role None; allowed: system, developer, user"),
        ([{"role": "user", "content": [{"type": "image"}]}], "row 5: message 0 has a content that is of type list"),
        ([{"role": "user"}], "row 5: message 0 has a content that is missing"),
    ],
)
def test_anything_else_is_refused_where_it_stands(value: object, message: str):
    with pytest.raises(PromptError, match=f"^{message.replace('.', '[.]')}"):
        check_prompt(value, "row 5")
