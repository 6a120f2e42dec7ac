"""The special tokens of a tokenizer, and rewards that look for special tokens in a text decoded without them.

The author of a model decides whether markup such as <think> is special.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tasks.configuration.evaluation import EvaluationConfig
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.run_config import RunConfig
from tasks.preparing.pattern_text import spelt

# The tags that the reward "math" looks for in a text.
MATH_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens added to the vocabulary after the tokenizer's training, and the tokens with a role."""
    return frozenset(map(int, (*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids)))


def is_dropped(tokenizer: Any, token_id: int) -> bool:
    """Whether decoding without special tokens leaves a token out."""
    kept, dropped = (str(tokenizer.decode([token_id], skip_special_tokens=skips)) for skips in (False, True))
    return bool(kept) and not dropped


def unseen_by_rewards(config: RunConfig, tokenizer: Any) -> list[str]:
    """A doubt for each setting of a reward that names a token missing in the texts of the reward.

    tokenizer: a tokenizer of transformers.
    """
    sections = [("rewards", config.rewards, config.sampling)]
    evaluation: EvaluationConfig | None = config.evaluation
    if evaluation is not None:
        own = evaluation.rewards
        named = ("rewards", config.rewards) if own is None else ("evaluation.rewards", own)
        sections.append((*named, evaluation.sampling))
    doubts: dict[str, None] = {}
    for section, rewards, sampling in sections:
        if sampling.skip_special_tokens:
            field = "sampling" if sampling is config.sampling else "evaluation.sampling"
            for place, reward in enumerate(rewards):
                for setting, told in _unseen(reward, tokenizer):
                    doubts[
                        f"{section}.{place}.{setting} names {told}; rewards see the text without special tokens; "
                        f"allowed: {field}.skip_special_tokens false, which keeps them"
                    ] = None
    return list(doubts)


def _unseen(reward: RewardConfig, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Each setting of a reward with its value, and the dropped special tokens named in the value."""
    ids = {str(tokenizer.convert_ids_to_tokens(each)): each for each in special_ids(tokenizer)}

    def told(found: Sequence[str]) -> str:
        dropped = [text for text in found if is_dropped(tokenizer, ids[text])]
        plural = "special tokens" if len(dropped) > 1 else "a special token"
        return f"{', '.join(map(repr, dropped))}, {plural} of the tokenizer" if dropped else ""

    for setting, text in _texts("arguments", reward.arguments):
        if named := told(_named(text, list(ids))):
            yield f"{setting}: value {text[:80]!r}", named
    if reward.function == "math" and (named := told([tag for tag in MATH_TAGS if tag in ids])):
        yield "function: value 'math', which reads tags,", named


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    """The texts in the arguments of a function, each with its place."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _texts(f"{name}.{place}", inner)


def _named(text: str, tokens: list[str]) -> list[str]:
    """The tokens that a pattern spells, or that occur in a text which is no pattern."""
    try:
        return spelt(text, tokens)
    except (re.error, OverflowError, RecursionError):
        return [token for token in tokens if token in text]
