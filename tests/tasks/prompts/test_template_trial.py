"""A chat template without bounds is refused in one line by a child process, and others pass, whatever they refuse."""

import pytest

from tasks.prompts.prompt import PromptError
from tasks.prompts.template_program import CHARACTERS_MAX, problem
from tasks.prompts.template_trial import try_templates
from tests.chat_families import FAMILIES
from tests.chat_tokenizers import GEMMA, QWEN, chat_tokenizer


@pytest.mark.parametrize("template", [*FAMILIES.values(), QWEN, GEMMA])
def test_the_templates_of_known_families_pass(template):
    assert problem([template], {"bos_token": "<s>"}) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ strftime_now('%Y') }}{% generation %}a{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}",
        "{{ messages[7].content.x.y }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",  # the sandbox refuses it, and so does the rendering
        "{% if",
    ],
)
def test_what_a_template_refuses_is_not_judged_here(template):
    assert problem([template], {}) is None


def test_a_text_without_bounds_is_found_in_any_template_of_a_tokenizer():
    long = "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxx{% endfor %}{% endfor %}"
    assert problem(["short", long], {}) == f"makes more than {CHARACTERS_MAX:,} characters of a short conversation"


def test_a_template_that_has_a_problem_with_tools_alone_is_found():
    long = (
        "{% if tools %}{% for i in range(90000) %}{% for j in range(900) %}xxxxxxxx{% endfor %}{% endfor %}{% endif %}"
    )
    assert "characters of a short conversation" in str(problem([long], {}))


@pytest.mark.slow
def test_a_tokenizer_with_a_usual_template_or_none_passes():
    assert try_templates(chat_tokenizer(QWEN)) == 1
    assert try_templates(chat_tokenizer(None)) == 0
    assert try_templates(chat_tokenizer({"default": QWEN, "tool_use": GEMMA})) == 2  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'x' * 10**10 }}", "needs more than 1,073,741,824 bytes of memory"),
        ("{{ '%10000000000d' % 1 }}", "needs more than 1,073,741,824 bytes of memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "for more than 1 s"),
        ("{{ 10 ** (10 ** 9) }}", "for more than 1 s"),
        ("{% for i in range(99999) %}{{ messages | tojson(indent=2) * 9 }}{% endfor %}", "makes more than 4,194,304"),
    ],
)
def test_a_template_without_bounds_is_refused_in_one_line(template, reason):
    with pytest.raises(
        PromptError, match=r"^policy\.path: the chat template .*; allowed: a template that ends"
    ) as caught:
        try_templates(chat_tokenizer(template), time_limit_s=1.0)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
