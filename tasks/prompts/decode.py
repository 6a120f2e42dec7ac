"""Decoding of token ids to text with the tokenizer of a model directory; `tokenise` does the reverse."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from storage.records.records import SamplingParams
from tasks.prompts.auto_tokenizer import read_tokenizer

Decode = Callable[[Sequence[int]], str]


def open_completion_decoder(model_dir: Path, sampling: SamplingParams) -> Decode:
    """A function that decodes the tokens of a response to the text that rewards see; raises the errors of transformers.

    If special tokens are kept, the stop token that ends the response is still none of its text.
    """
    decode = open_decoder(model_dir, special_tokens=not sampling.skip_special_tokens)
    if sampling.skip_special_tokens:
        return decode
    stops = frozenset(sampling.stop_token_ids)

    def decode_completion(token_ids: Sequence[int]) -> str:
        has_ended = len(token_ids) > 0 and int(token_ids[-1]) in stops
        return decode(token_ids[:-1] if has_ended else token_ids)

    return decode_completion


def open_decoder(model_dir: Path, *, special_tokens: bool = False) -> Decode:
    """A function that decodes token ids to text, with special tokens if asked; raises the errors of transformers."""
    tokenizer: Any = read_tokenizer(model_dir)

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)
        return text

    return decode
