"""Prompts that a program submits as tokens: the tokens decide, and text is for people."""

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
