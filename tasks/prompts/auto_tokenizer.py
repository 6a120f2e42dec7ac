"""Parts of transformers that need no model, imported without torch in a process that has called `forgo_models`.

If torch is installed, transformers imports it with the first tokenizer, which takes seconds and hundreds of MB that a
tokenizer does not use. Release 5 has no setting against the import, but works without torch, and takes torch for absent
if Python's module table says so.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_forgone = False


def forgo_models() -> None:
    """Declare that this process needs no model of transformers; later imports leave out torch."""
    global _forgone  # noqa: PLW0603 - which modules a process has is a fact of the process
    _forgone = True
    # Otherwise transformers advises to install PyTorch, which a user may take for the cause of a failure.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def auto_tokenizer() -> Any:
    """The class AutoTokenizer; after `forgo_models` without torch, unless transformers or torch is imported already."""
    return _transformers("AutoTokenizer")


def schema_maker() -> Callable[[Callable[..., Any]], dict[str, Any]]:
    """The function get_json_schema, which makes the JSON schema of a function; without torch as `auto_tokenizer`."""
    return _transformers("utils").get_json_schema  # type: ignore[no-any-return]


def read_tokenizer(model_dir: Path) -> Any:
    """The tokenizer in a model directory, without the network and without running the directory's code.

    Raises the errors of transformers for files that transformers does not understand.
    """
    return auto_tokenizer().from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)


def _transformers(name: str) -> Any:
    """An attribute of transformers; after `forgo_models` imported as if torch were absent."""
    if not _forgone or {"torch", "transformers"} & sys.modules.keys():
        return _import(name)
    # In Python's import system, None stands for a module that cannot be imported. transformers checks only once.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return _import(name)
    finally:
        del sys.modules["torch"]


def _import(name: str) -> Any:
    import transformers  # noqa: PLC0415 - costs seconds

    return getattr(transformers, name)
