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


def test_nulls_of_arrow_are_absent_at_every_depth_and_those_in_lists_are_kept():
    call = {"id": None, "function": {"name": "f", "arguments": {"a": 1, "b": None, "c": [None, {"d": None, "e": 2}]}}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}
    [found] = check_prompt([message], "row 0")
    assert found["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1, "c": [None, {"e": 2}]}}}]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_message_that_calls_tools_needs_no_content(content):
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], **content}
    assert check_prompt([message], "row 0") == [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], "content": ""}
    ]


def test_parts_that_are_text_are_one_text():
    parts = [{"type": "text", "text": "a ", "image": None}, {"type": "text", "text": "b"}]
    assert check_prompt([{"role": "user", "content": parts}], "row 0") == [{"role": "user", "content": "a b"}]


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
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "row 5: message 0 has a part that is 'image'; allowed: text",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "row 5: message 0 has a part that is 'text'; allowed: text",
        ),
        ([{"role": "user", "content": ["hi"]}], "row 5: message 0 has a part that is of type str; allowed: text, or"),
        ([{"role": "user", "content": []}], "row 5: message 0 has a content that is an empty list"),
        ([{"role": "user", "content": None}], "row 5: message 0 has a content that is missing"),
        ([{"role": "user", "tool_calls": [{"id": "a"}]}], "row 5: message 0 has a content that is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "row 5: message 0 has a content that is missing"),
        ([{"role": "assistant", "tool_calls": "[{}]"}], "row 5: message 0 has tool_calls that are no list of objects"),
        ([{"role": "user"}], "row 5: message 0 has a content that is missing"),
    ],
)
def test_anything_else_is_refused_where_it_stands(value: object, message: str):
    with pytest.raises(PromptError, match=f"^{message.replace('.', '[.]')}"):
        check_prompt(value, "row 5")
