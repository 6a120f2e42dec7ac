"""Prompts that a program submits as tokens: the tokens decide, and text is for people."""

import numpy as np
import pytest

from tasks.prompts.prompt import PromptError
from tasks.prompts.submitted import SubmittedPrompts


def test_tokens_are_taken_as_they_are_and_are_part_of_the_id():
    text, tokens, others = (
        SubmittedPrompts([{"prompt": "a", **given}])[0]
        for given in ({}, {"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 3]})
    )
    assert (text.token_ids, tokens.token_ids, tokens.columns) == (None, (1, 2), {})
    assert len({text.id, tokens.id, others.id}) == 3


@pytest.mark.parametrize("tokens", [[], [-1], [1 << 32], [True], [1.0], "12", {"a": 1}, 7])
def test_other_tokens_are_refused(tokens):
    with pytest.raises(PromptError, match=r"prompts\.0: prompt_token_ids: allowed: a list of token ids"):
        SubmittedPrompts([{"prompt": "a", "prompt_token_ids": tokens}])


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        ([], "none; allowed: at least one"),
        (np.array([]), "none; allowed: at least one"),
        ("1+1=", "value of type str; allowed: a list of prompts"),
        ({"prompt": "1+1="}, "value of type dict; allowed: a list of prompts"),
        (5, "value of type int; allowed: a list of prompts"),
        ([{"prompt": "1+1=", 3: 1}], "column 3; allowed: a name that is text"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused_in_one_line(prompts, line):
    with pytest.raises(PromptError, match=line):
        SubmittedPrompts(prompts)


@pytest.mark.parametrize("prompts", [np.array(["1+1=", "2+2="]), iter(["1+1=", "2+2="]), ("1+1=", "2+2=")])
def test_whatever_gives_prompts_in_order_is_a_list(prompts):
    assert [prompt.text_or_messages for prompt in SubmittedPrompts(prompts)] == ["1+1=", "2+2="]
