"""The vocabulary of a tokenizer, and its digest: policy and teacher must mean the same text by the same token."""

import json
from collections.abc import Mapping
from pathlib import Path

from storage.digests import digest_of
from tasks.prompts.auto_tokenizer import read_tokenizer
from tasks.prompts.prompt import PromptError


def read_vocabulary(model_dir: Path) -> dict[str, int]:
    """The id of every token of the tokenizer in a model directory; raises PromptError."""
    try:
        vocabulary: dict[str, int] = read_tokenizer(model_dir).get_vocab()
    except Exception as error:  # noqa: BLE001 - with damaged files, libraries may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise PromptError(f"{model_dir}: no usable tokenizer: {reason}") from None
    return vocabulary


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """32 hexadecimal digits that name a vocabulary."""
    ordered = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
    return digest_of(json.dumps(ordered, separators=(",", ":")).encode())


def first_difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """The token of the lowest id that only one vocabulary has at this id, in words; raises ValueError without one."""
    differing = set(ours.items()) ^ set(theirs.items())
    token, number = min(differing, key=lambda item: (item[1], item[0]))
    return f"{token[:40]!r} with id {number}"
