import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prompts.written_values import CHARACTERS_MAX, holds_messages, read_value

MESSAGES = [{"role": "user", "content": "it's\n2"}, {"role": "assistant", "content": 'a "b"'}]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.lists(JSON_VALUES) | st.dictionaries(st.text(), JSON_VALUES))
def test_what_json_and_python_write_is_read(value):
    assert read_value(f" {json.dumps(value)}\n") == value
    assert read_value(repr(value)) == value


@pytest.mark.parametrize(
    "text", ["", "4", '"a"', "[1", "[1}", "{x}", "(1, 2)", "[" * 10_000 + "]" * 10_000, "\\boxed{1}"]
)
def test_other_text_holds_nothing(text):
    assert read_value(text) is None


def test_text_of_any_length_is_looked_at_in_bounded_time():
    assert read_value(f"[{' ' * CHARACTERS_MAX}]") is None


@pytest.mark.parametrize(
    "value",
    [
        MESSAGES,
        MESSAGES[0],
        {"messages": MESSAGES},
        [{"from": "human", "value": "hi"}],
        [{"type": "text", "text": "a"}],
    ],
)
def test_conversations_are_recognised_however_they_were_written(value):
    assert holds_messages(json.dumps(value))
    assert holds_messages(json.dumps(value, indent=2))
    assert holds_messages(repr(value))


def test_what_numpy_prints_of_messages_is_recognised():
    assert holds_messages("[{'role': 'system', 'content': 'a'}\n {'role': 'user', 'content': 'b'}]")


@pytest.mark.parametrize(
    "text",
    [
        'Which "role" has [x]?',
        '{"role": "king"}',
        '[{"role": "user", "content": "a"}] Continue it.',
        "[]",
        '{"messages": []}',
        "[1, {'role': 1}]",
        "f([{'role': 'a', 'content': g()}])",
        "[{'role': 'a', 'content': g()}]",
    ],
)
def test_a_text_about_such_things_is_a_text(text):
    assert not holds_messages(text)
