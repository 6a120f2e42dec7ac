"""What is rendered of a row: what transformers makes of its tools, arguments and last message, from any file."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.configuration.data import DataConfig
from tasks.prompts.draw import draw_prompts
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError
from tasks.prompts.rendering import rendering, tools_of
from tests.chat_families import FAMILIES
from tests.chat_tokenizers import QWEN, chat_tokenizer
from tests.property_examples import part_of_examples

USER = {"role": "user", "content": "2 + 2?"}
BEGUN = {"role": "assistant", "content": "It is  "}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
ASKS = {"add_generation_prompt": True}


def texts(folder: Any, rows: Any, tokenizer: Any, **fields: Any) -> list[str]:
    """The texts of the prompts of rows, or of a file of them."""
    source = rows
    if isinstance(rows, list):
        source = folder / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source=str(source), shuffle=False, **fields)
    prompts = load_prompts(data)
    sizes = {"first": 0, "count": len(prompts), "context_length": 100_000, "max_completion_length": 1}
    return [tokenizer.decode(row.token_ids) for row in draw_prompts(prompts, tokenizer, data, **sizes)]


def test_a_column_of_tools_is_shown_as_transformers_shows_it_and_reaches_the_rewards(tmp_path):
    tokenizer = chat_tokenizer(QWEN)
    wanted = tokenizer.apply_chat_template([USER], tools=[TOOL], add_generation_prompt=True, tokenize=False)
    rows = [{"prompt": [USER], "tools": [TOOL]}, {"prompt": [USER], "tools": json.dumps([TOOL])}]
    assert texts(tmp_path, rows, tokenizer) == [wanted, wanted]
    assert load_prompts(DataConfig(source=str(tmp_path / "rows.jsonl"))).columns == {"tools"}
    without = [{"prompt": [USER], "tools": tools} for tools in (None, [], "", "null")]
    assert texts(tmp_path, without, tokenizer) == 4 * texts(tmp_path, [{"prompt": [USER]}], tokenizer)


def test_arguments_of_the_template_are_the_runs_and_over_them_the_rows(tmp_path):
    tokenizer = chat_tokenizer(FAMILIES["qwen3"])
    rows = [
        {"prompt": [USER]},
        *({"prompt": [USER], "chat_template_kwargs": {"enable_thinking": on}} for on in (True, False)),
    ]
    thinks, silent = (
        tokenizer.apply_chat_template([USER], add_generation_prompt=True, enable_thinking=on, tokenize=False)
        for on in (True, False)
    )
    assert thinks != silent
    assert texts(tmp_path, rows, tokenizer) == [thinks, thinks, silent]
    assert texts(tmp_path, rows, tokenizer, chat_template_kwargs={"enable_thinking": False}) == [silent, thinks, silent]


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "smollm3", "phi3"])
def test_a_last_message_is_continued_as_transformers_continues_it(tmp_path, family):
    tokenizer = chat_tokenizer(FAMILIES[family])
    rows = [{"prompt": [USER, BEGUN]}, {"prompt": [USER]}]
    continued = tokenizer.apply_chat_template([USER, BEGUN], continue_final_message=True, tokenize=False)
    begun = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    assert continued.rstrip().endswith("It is")
    assert texts(tmp_path, rows, tokenizer, continue_final_message=True) == [continued, begun]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"chat_template_kwargs": [1]}, "the column chat_template_kwargs is of type list; allowed: an object, or null"),
        ({"chat_template_kwargs": "thinking"}, "the column chat_template_kwargs is of type str; allowed"),
        ({"chat_template_kwargs": {"tools": []}}, "the column chat_template_kwargs has 'tools'; allowed: arguments"),
    ],
)
def test_arguments_that_cannot_be_some_are_refused_by_the_name_of_the_prompt(tmp_path, columns, reason):
    with pytest.raises(PromptError, match=f"prompt '0': {reason}"):
        texts(tmp_path, [{"prompt": [USER], **columns}], chat_tokenizer(QWEN))


def test_arguments_as_json_text_are_those_it_holds():
    data = DataConfig(source="a.jsonl", chat_template_kwargs={"a": 1, "b": 2})
    assert rendering([USER], {"chat_template_kwargs": '{"b": 3}'}, data) == ASKS | {"a": 1, "b": 3}
    assert rendering([USER], {"chat_template_kwargs": {"b": None}}, data) == ASKS | {"a": 1, "b": 2}


@pytest.mark.parametrize("value", ["a hammer", 3, ["look"], {"name": "look"}, "{", '"a"'])
def test_a_column_tools_of_another_kind_is_no_list_of_tools(value):
    assert tools_of({"tools": value}) == []


NAMES = st.sampled_from("abc")
VALUES = st.integers(0, 3) | st.text("xy", max_size=2)
# Arrow wants one type for the values of a name.
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"a": st.integers(0, 3) | st.none(), "b": st.text("xy"), "c": st.lists(st.integers(0, 3))}
)
CALLS = st.lists(
    ARGUMENTS.map(lambda given: {"function": {"name": "look", "arguments": given}}), min_size=1, max_size=2
)
TURNS = st.fixed_dictionaries({"content": st.none() | st.just("so")}, optional={}).flatmap(
    lambda content: CALLS.map(lambda calls: {"role": "assistant", "tool_calls": calls, **content})
)
SCHEMAS = st.fixed_dictionaries(
    {"name": NAMES}, optional={"default": st.none() | st.integers(0, 3), "title": st.text("xy")}
)
ROWS = st.fixed_dictionaries(
    {"prompt": st.lists(TURNS, max_size=2).map(lambda turns: [USER, *turns, {"role": "tool", "content": "x"}])},
    optional={
        "tools": st.none() | st.lists(SCHEMAS, max_size=2).map(lambda found: [{"function": each} for each in found]),
        "chat_template_kwargs": st.none()
        | st.fixed_dictionaries({}, optional={"x": st.none() | st.booleans(), "y": st.integers(0, 3)}),
    },
)
SORTED = (
    "{% for t in tools or [] %}{{ t | tojson(sort_keys=true) }}{% endfor %}{{ x }}{{ y }}"
    "{% for m in messages %}{{ m | tojson(sort_keys=true) }}{% endfor %}"
)


@settings(max_examples=part_of_examples(1), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROWS, min_size=1, max_size=4))
def test_a_prompt_is_the_same_from_parquet_as_from_json_lines(tmp_path, rows):
    """Apart from the order of names, which Arrow does not keep for each row."""
    tokenizer = chat_tokenizer(SORTED)
    try:
        columns = dict.fromkeys(name for row in rows for name in row)
        pq.write_table(pa.Table.from_pylist([columns | row for row in rows]), tmp_path / "rows.parquet")
    except pa.ArrowNotImplementedError:  # no row has a name in a mapping, which Parquet cannot store
        return
    assert texts(tmp_path, tmp_path / "rows.parquet", tokenizer) == texts(tmp_path, rows, tokenizer)
