"""The special tokens of a tokenizer, and rewards that look for them in a text from which decoding has dropped them.

Whether markup such as <think> is special is decided by the model's author.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tasks.configuration.evaluation import EvaluationConfig
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.run_config import RunConfig
from tasks.preparing.pattern_text import spelt

# What the reward "math" looks for in a text, beside mathematics.
MATH_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def special_ids(tokenizer: Any) -> frozenset[int]:
    """All tokens that were added to the vocabulary that the tokenizer was trained with, and those with a role."""
    return frozenset(map(int, (*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids)))


def is_dropped(tokenizer: Any, token_id: int) -> bool:
    """Whether decoding without special tokens leaves a token out."""
    kept, dropped = (str(tokenizer.decode([token_id], skip_special_tokens=skips)) for skips in (False, True))
    return bool(kept) and not dropped


def unseen_by_rewards(config: RunConfig, tokenizer: Any) -> list[str]:
    """A doubt for each setting of a reward that names a token which its texts do not have.

    tokenizer: one of transformers.
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
    """Each setting with its value, and the special tokens that it names."""
    ids = {str(tokenizer.convert_ids_to_tokens(each)): each for each in special_ids(tokenizer)}

    def told(found: Sequence[str]) -> str:
        dropped = [text for text in found if is_dropped(tokenizer, ids[text])]
        plural = "special tokens" if len(dropped) > 1 else "a special token"
        return f"{', '.join(map(repr, dropped))}, {plural} of the tokenizer" if dropped else ""

    texts = [("pattern", reward.pattern)] if reward.pattern is not None else list(_texts("arguments", reward.arguments))
    for setting, text in texts:
        if named := told(_named(text, list(ids))):
            yield f"{setting}: value {text[:80]!r}", named
    if reward.function == "math" and (named := told([tag for tag in MATH_TAGS if tag in ids])):
        yield "function: value 'math', which reads tags,", named


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    """The texts in the arguments of a function of the user's own, with their places."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _texts(f"{name}.{place}", inner)


def _named(text: str, tokens: list[str]) -> list[str]:
    """The tokens that a pattern names; an argument may be one."""
    try:
        return spelt(text, tokens)
    except (re.error, OverflowError, RecursionError):
        return [token for token in tokens if token in text]
