"""Rows and chat templates whose prompts cannot be made, or are looked at for long: one line that names the prompt.

To add a case, add a line to ROWS or to TEMPLATES.
"""

import json
from time import perf_counter

import pytest

from tasks.configuration.data import DataConfig
from tasks.prompts.draw import draw_prompts
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError
from tasks.prompts.row_comparison import compare
from tests.chat_tokenizers import QWEN, chat_tokenizer

SECONDS_MAX = 20.0  # a busy machine takes a tenth of it
USER = {"role": "user", "content": "hi"}
LONG = 300_000

TEMPLATES = {
    "a range": "{% for i in range(10**9) %}x{% endfor %}",
    "itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "the interpreter": "{{ ().__class__.__mro__[1].__subclasses__()[0] }}",
    "a file": "{% include '/etc/passwd' %}",
    "no role": "{{ messages[0].author.name }}",
    "no syntax": "{% for m in messages %}",
    "its own words": "{{ raise_exception('a\nb') }}",
    "nothing": "{# #}",
}
# Each is accepted, doubted or refused.
ROWS = {
    "brackets": {"prompt": "[" * LONG + "]" * LONG + " 'role'"},
    "messages of brackets": {"prompt": '[{"role": "user", "content": ' + "[" * LONG},
    "a long conversation as text": {"prompt": json.dumps([USER] * 10_000)},
    "quotes": {"prompt": "'role'" + "[{'role': " * 30_000},
    "blanks": {"prompt": [{"role": "user", "content": "a " * LONG}, {"role": "system", "content": "\n" * LONG}]},
    "arguments": {"prompt": [USER], "chat_template_kwargs": {f"a{n}": n for n in range(1000)}},
    "tools": {"prompt": [USER], "tools": [{"function": {"name": f"f{n}"}} for n in range(1000)]},
    "tools without names": {"prompt": [USER], "tools": [{}, {"function": 3}, {"function": {"name": None}}]},
    "calls without names": {"prompt": [USER, {"role": "assistant", "tool_calls": [{}, {"function": 3}]}, USER]},
    "marks of the look": {"prompt": [{"role": "user", "content": "7310946582\0"}]},
}


def looked_at(folder, row, template):
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    data, tokenizer = DataConfig(source=str(file)), chat_tokenizer(template)
    prompts = load_prompts(data)
    sizes = {"first": 0, "count": 1, "context_length": 10**8, "max_completion_length": 1}
    return compare(draw_prompts(prompts, tokenizer, data, **sizes), prompts, tokenizer, tokenizer, data, ())


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_cannot_be_used_is_refused_in_one_line(tmp_path, name):
    began_s = perf_counter()
    with pytest.raises(PromptError, match="prompt '0'") as caught:
        looked_at(tmp_path, {"prompt": [USER]}, TEMPLATES[name])
    assert perf_counter() - began_s < SECONDS_MAX
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_looked_at_in_bounded_time_and_told_of_in_short_lines(tmp_path, name):
    began_s = perf_counter()
    try:
        lines = looked_at(tmp_path, ROWS[name], QWEN)
    except PromptError as error:
        lines = str(error).splitlines()
    assert perf_counter() - began_s < SECONDS_MAX
    assert all(len(line) < 700 for line in lines)
