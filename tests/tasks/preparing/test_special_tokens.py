"""Rewards that look for tokens which decoding drops: each setting that names one is doubted, with what to set."""

from typing import Any

import pytest
from tokenizers import AddedToken

from tasks.configuration.run_config import parse
from tasks.preparing.special_tokens import is_dropped, special_ids, unseen_by_rewards
from tests.chat_tokenizers import CHATML, MARKUP, SPECIAL, chat_tokenizer

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
FORMAT = {"function": "format", "arguments": {"pattern": r"<think>.*?</think>\s*<answer>.*?</answer>"}}


def tokenizer_with(*, special: bool) -> Any:
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS], special_tokens=special)
    return tokenizer


def doubts(tokenizer: Any, *rewards: dict[str, Any], **sections: Any) -> list[str]:
    document = {"run": {"url": "memory://x"}, "policy": {"path": "/model"}, "data": {}, "rewards": list(rewards)}
    return unseen_by_rewards(parse(document | sections), tokenizer)


def test_a_pattern_that_names_what_is_dropped_is_doubted_with_the_way_out():
    (doubt,) = doubts(
        tokenizer_with(special=True), {"function": "length", "arguments": {"free_tokens": 1, "scale_tokens": 1}}, FORMAT
    )
    assert doubt.startswith("rewards.1.arguments.pattern: value '<think>.*?</think>")
    assert "names '<think>', '</think>', '<answer>', '</answer>', special tokens of the tokenizer" in doubt
    assert doubt.endswith("allowed: sampling.skip_special_tokens false, which keeps them")


def test_what_is_text_or_kept_is_not_doubted():
    assert doubts(tokenizer_with(special=False), FORMAT, {"function": "math"}) == []
    assert doubts(chat_tokenizer(CHATML), FORMAT, {"function": "math"}) == []
    kept = {"sampling": {"skip_special_tokens": False}}
    assert doubts(tokenizer_with(special=True), FORMAT, {"function": "math"}, **kept) == []


@pytest.mark.parametrize(
    ("reward", "field", "named"),
    [
        (
            {"function": "format", "arguments": {"pattern": r".*<\|im_end\|>"}},
            "rewards.0.arguments.pattern",
            "'<|im_end|>', a special token",
        ),
        ({"function": "math"}, "rewards.0.function: value 'math'", "'<think>', '</think>', '<answer>', '</answer>', "),
        (
            {"function": "my:made", "arguments": {"tags": ["<b>", "</answer>"], "n": 3}},
            "rewards.0.arguments.tags.1: value '</answer>'",
            "'</answer>', a special token",
        ),
        (
            {"function": "my:made", "arguments": {"like": r"\[\<think\>"}},
            "rewards.0.arguments.like: value ",
            "'<think>', a special token",
        ),
        ({"function": "my:made", "arguments": {"like": "([<think>"}}, "rewards.0.arguments.like", "'<think>', a spec"),
    ],
)
def test_each_setting_of_each_reward_is_looked_at(reward: dict[str, Any], field: str, named: str):
    (doubt,) = doubts(tokenizer_with(special=True), reward)
    assert doubt.startswith(field)
    assert f"names {named}" in doubt


def test_an_evaluation_is_read_by_its_own_sampling():
    tokenizer = tokenizer_with(special=True)
    kept, skipped = {"skip_special_tokens": False}, {"skip_special_tokens": True}
    for sampling, own, expected in (
        (kept, kept, []),
        (skipped, kept, ["sampling.skip"]),
        (kept, skipped, ["evaluation.sampling.skip"]),
    ):
        found = doubts(tokenizer, FORMAT, sampling=sampling, evaluation={"data": {}, "sampling": own})
        assert [part in doubt for part, doubt in zip(expected, found, strict=True)] == [True] * len(expected)
    (own_reward,) = doubts(
        tokenizer, {"function": "arithmetic"}, evaluation={"data": {}, "rewards": [FORMAT], "sampling": skipped}
    )
    assert own_reward.startswith("evaluation.rewards.0.arguments.pattern: ")


def test_special_tokens_that_are_dropped_are_those_of_the_tokenizers_author():
    tokenizer = tokenizer_with(special=True)
    texts = {tokenizer.convert_ids_to_tokens(each): is_dropped(tokenizer, each) for each in special_ids(tokenizer)}
    assert texts == dict.fromkeys([*SPECIAL, *TAGS], True) | dict.fromkeys(MARKUP, False)
    assert not is_dropped(tokenizer, tokenizer.convert_tokens_to_ids("a"))
