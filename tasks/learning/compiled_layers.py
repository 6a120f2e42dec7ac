"""Compiled layers: torch.compile of each layer of a model, with sizes that may change from pass to pass."""

import logging
from typing import Any

from tasks.learning.batching import TokenBatch
from tasks.learning.equal_passes import Pass, change_if_equal
from tasks.learning.packing import leave_attention_uncompiled
from tasks.learning.ranks import Ranks
from tasks.learning.sharded import layers

log = logging.getLogger("gleaner")


def compile_if_equal(
    model: Any, logprobs: Pass, batch: TokenBatch, ranks: Ranks | None = None, *, backend: str = "inductor"
) -> bool:
    """Compile a model's layers if log-probs then stay equal on every rank; otherwise log the reason and undo.

    Args:
        model: A Hugging Face model, already packed if packing is used.
        logprobs: A pass of the model as it is.
        batch: The probe; later passes may have different sizes.
        ranks: The ranks that decide together; default: this process alone.
        backend: The name of torch's compiler backend.

    Returns:
        Whether the layers are compiled.
    """

    def undo() -> None:
        for layer in layers(model):
            layer._compiled_call_impl = None  # noqa: SLF001 - torch has no public way back

    reason = change_if_equal(lambda: compile_layers(model, backend=backend), undo, logprobs, batch, ranks)
    if reason is not None:
        log.info("layers of %s are not compiled: %s", type(model).__name__, reason)
    return reason is None


def compile_layers(model: Any, *, backend: str = "inductor") -> None:
    """Let the first pass compile each of a model's layers; layers of the same kind share the code."""
    leave_attention_uncompiled()
    for layer in layers(model):
        layer.compile(backend=backend, dynamic=True)
