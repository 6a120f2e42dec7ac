"""transformers' AutoTokenizer: with torch, as it comes, or without in a process that has said it will need no model.

transformers imports torch with its first tokenizer wherever torch is installed: seconds, and hundreds of MB, of which a
tokenizer uses nothing. Release 5 has no switch against that; but it works without torch, which it takes for absent
when Python's own table of modules says so.
"""

import os
import sys
from typing import Any

_forgone = False


def forgo_models() -> None:
    """Say that this process will need no model of transformers, neither now nor later: it then imports no torch."""
    global _forgone  # noqa: PLW0603 - which modules a process has is a fact of the process
    _forgone = True
    # It would advise to install PyTorch, which somebody may take for the reason of a failure.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def auto_tokenizer() -> Any:
    """The class AutoTokenizer; after `forgo_models` without torch, unless transformers or torch was there before."""
    if not _forgone or {"torch", "transformers"} & sys.modules.keys():
        return _import()
    # None is what the import system documents for a module that cannot be had. transformers looks once.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return _import()
    finally:
        del sys.modules["torch"]


def _import() -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415 - costs seconds

    return AutoTokenizer
