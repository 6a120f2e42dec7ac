"""Decoding of token ids to text with the tokenizer of a model directory; `tokenise` does the reverse."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks.prompts.auto_tokenizer import read_tokenizer

Decode = Callable[[Sequence[int]], str]


def open_decoder(model_dir: Path, *, special_tokens: bool = False) -> Decode:
    """A function that decodes token ids to text, with special tokens if asked; raises the errors of transformers."""
    tokenizer: Any = read_tokenizer(model_dir)

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)
        return text

    return decode
