"""What a policy writes becomes calls; what cannot be called has a problem, and nothing raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.turns.policy_turn import ToolCall, read_gemma, read_parsed, read_tagged
from tasks.turns.tool_schemas import describe_tools


def search(query: str, limit: int = 5) -> str:
    """Search.

    Args:
        query: What for.
        limit: How many results.
    """
    return query * limit


SCHEMAS = describe_tools([search])


def tagged(body):
    return read_tagged(f"<tool_call>{body}</tool_call>", SCHEMAS)


def test_several_calls_and_the_text_around_them():
    text = 'a <tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call> b <tool_call>\n{"name": "search", '
    turn = read_tagged(text + '"arguments": {"query": "y", "limit": 2}}\n</tool_call>', SCHEMAS)
    assert turn.content == "a  b"
    assert turn.calls == (
        ToolCall("search", {"query": "x"}, None),
        ToolCall("search", {"query": "y", "limit": 2}, None),
    )


def test_a_call_that_the_end_of_the_turn_cut_off_is_a_call():
    [call] = read_tagged('<tool_call>{"name": "search", "arguments": {"query": "x"}}', SCHEMAS).calls
    assert call == ToolCall("search", {"query": "x"}, None)


def test_the_form_with_parameters_gives_text_where_text_is_wanted():
    body = "\n<function=search>\n<parameter=query>\n12\n</parameter>\n<parameter=limit>\n3\n</parameter>\n</function>\n"
    assert tagged(body).calls == (ToolCall("search", {"query": "12", "limit": 3}, None),)


@pytest.mark.parametrize(
    ("body", "name", "arguments", "problem"),
    [
        ("{", "", "{", "the call is not JSON: Expecting property name"),
        ('["search"]', "", '["search"]', "the call is not of the form"),
        ('{"name": 3}', "", '{"name": 3}', "the call is not of the form"),
        ('{"name": "find", "arguments": {}}', "find", {}, "there is no tool 'find'; there are: search"),
        ('{"name": "search", "arguments": "x"}', "search", '"x"', "the arguments of search are 'x'; allowed: a JSON"),
        ('{"name": "search", "arguments": [1]}', "search", "[1]", "the arguments of search are [1]; allowed: a JSON"),
        ('{"name": "search"}', "search", {}, "search needs the argument query"),
        (
            '{"name": "search", "arguments": {"query": 1}}',
            "search",
            {"query": 1},
            "search: query is 1; allowed: string",
        ),
        ('{"name": "search", "arguments": {"query": NaN}}', "", None, "the call is not JSON: NaN is no JSON number"),
        ('{"name": "search", "arguments": {"query": "\\ud800"}}', "", None, "the call is not JSON: it holds half of a"),
        ('{"name": "search", "arguments": {"query": 1e999}}', "", None, "the call is not JSON: Out of range float"),
        ("[" * 100_000, "", None, "the call is not JSON: it is nested too deep"),
        ("[" * 99 + "]" * 99, "", None, "the call is not JSON: it is nested too deep"),
        ('{"name": ' + "1" * 5000 + "}", "", None, "the call is not JSON: Exceeds the limit"),
    ],
)
def test_a_call_that_cannot_be_made_says_why(body, name, arguments, problem):
    [call] = tagged(body).calls
    assert (call.name, call.arguments) == (name, body if arguments is None else arguments)
    assert call.problem is not None
    assert call.problem.startswith(problem)
    assert "\n" not in call.problem


@pytest.mark.parametrize(
    ("body", "arguments", "problem"),
    [
        ('{query:<|"|>a<|"|>}', {"query": "a"}, None),
        ("{query:}", "{query:}", "the arguments of search are not JSON"),
        ("", "", "the arguments of search are not JSON"),
    ],
)
def test_calls_as_gemma_writes_them(body, arguments, problem):
    turn = read_gemma(f"so <|tool_call>call:search{body}<tool_call|>", SCHEMAS)
    assert turn.content == "so"
    [call] = turn.calls
    assert (call.name, call.arguments) == ("search", arguments)
    assert (call.problem or "").startswith(problem or "")
    assert (call.problem is None) == (problem is None)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ({"function": {"name": "search", "arguments": {"query": "a"}}}, ToolCall("search", {"query": "a"}, None)),
        ({"function": {"name": "search", "arguments": '{"query": "a"}'}}, ToolCall("search", {"query": "a"}, None)),
        ({"name": "search", "arguments": {"query": "a"}}, ToolCall("search", {"query": "a"}, None)),
        ("search", ToolCall("", '"search"', "the call has no name")),
    ],
)
def test_calls_that_transformers_has_parsed(call, found):
    assert read_parsed({"content": "c", "tool_calls": [call]}, SCHEMAS).calls == (found,)


@given(st.text() | st.text(alphabet='{}[]",:<>|/=tool_callfunctionparameter name1'))
def test_nothing_that_is_written_raises(text):
    for read in (read_tagged, read_gemma):
        for written in (text, f"<tool_call>{text}", f"<|tool_call>call:search{text}", f"<tool_call><function={text}"):
            turn = read(written, SCHEMAS)
            json.dumps([[call.name, call.arguments, call.problem] for call in turn.calls])
