"""The tokenizer of a model directory."""

from pathlib import Path

from tasks.learning.pretrained import ModelError
from tasks.prompts.auto_tokenizer import read_tokenizer
from tasks.prompts.tokenise import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def open_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a model directory; raises ModelError if there is no usable one."""
    # Without any of these files transformers makes a tokenizer that knows no word.
    if not any((model_dir / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"policy.path: no tokenizer in {str(model_dir)!r}; looked for {', '.join(TOKENIZER_FILES)}")
    try:
        tokenizer: Tokenizer = read_tokenizer(model_dir)
    except Exception as error:  # a damaged file can raise anything in the library that reads it
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"policy.path: no usable tokenizer in {str(model_dir)!r}: {reason}") from error
    return tokenizer
