"""Liger kernels: fused Triton kernels for a Hugging Face model's norms, rotary embedding and gated activation.

The head is not patched, because `tasks.learning.token_objective` computes its loss. The package liger-kernel and a GPU
are needed.
"""

import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from storage.errors import WrongInputError
from tasks.learning.batching import TokenBatch
from tasks.learning.equal_passes import Pass, change_if_equal
from tasks.learning.ranks import Ranks

log = logging.getLogger("gleaner")

# The parts that are patched if the model has them; Liger's other patches would replace the head, the loss, or what
# other models in the process read.
PATCHES = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")
_ABSENT = object()


class NoLigerKernelsError(WrongInputError):
    """There are no Liger kernels for a model on its device."""


def liger_if_equal(
    model: Any, device: torch.device, logprobs: Pass, batch: TokenBatch, ranks: Ranks | None = None
) -> str | None:
    """Patch a model with Liger's kernels if log-probs stay equal on every rank; log the outcome.

    Args:
        model: A Hugging Face causal language model.
        device: The model's device.
        logprobs: A pass of the model as it is.
        batch: The probe.
        ranks: The ranks that decide together; default: this process alone.

    Returns:
        The reason for keeping the model's own kernels; None for a patched model.
    """
    patch = LigerPatch(model)
    reason = change_if_equal(lambda: patch.apply(patch_of(model, device)), patch.undo, logprobs, batch, ranks)
    kernels = "Liger's kernels" if reason is None else f"no Liger kernels: {reason}"
    log.info("passes of %s have %s", type(model).__name__, kernels)
    return reason


def patch_of(model: Any, device: torch.device) -> Callable[..., None]:
    """Liger's function that patches models of this type; raises NoLigerKernelsError."""
    if device.type != "cuda":
        raise NoLigerKernelsError(f"they need a GPU, and the model is on device {str(device)!r}")
    try:
        patches = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise NoLigerKernelsError(f"the package liger-kernel cannot be imported: {error}") from None
    model_type = model.config.model_type
    if model_type not in patches:
        raise NoLigerKernelsError(f"Liger has none for a model of type {model_type!r}")
    patch: Callable[..., None] = patches[model_type]
    return patch


def options_of(patch: Callable[..., None]) -> dict[str, bool]:
    """The arguments for one of Liger's patch functions that switch `PATCHES` on and everything else off."""
    switches = [name for name, known in inspect.signature(patch).parameters.items() if isinstance(known.default, bool)]
    return {name: name in PATCHES for name in switches}


class LigerPatch:
    """The methods that Liger replaces in the modules of one model. Names and parameters stay.

    Liger also replaces classes and functions of the module of transformers that defines the model, for every model of
    the process. The classes are put back. The rotary embedding, which layers look up in the defining module, is Liger's
    only for half-precision tensors on a GPU.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def apply(self, patch: Callable[..., None]) -> None:
        """Call one of Liger's patch functions."""
        defining = vars(sys.modules[type(self._model).__module__])
        places = [(place, dict(place)) for place in (defining, *(part.__dict__ for part in self._model.modules()))]
        try:
            patch(model=self._model, **options_of(patch))
        finally:
            for place, before in places:
                changed = [name for name, value in place.items() if before.get(name, _ABSENT) is not value]
                self._before += [(place, name, before.get(name, _ABSENT)) for name in changed]
        for name, own in [(name, own) for place, name, own in self._before if place is defining]:
            is_rotary = name.startswith("apply_rotary") and own is not _ABSENT
            _put(defining, name, _in_half_precision(own, defining[name]) if is_rotary else own)

    def undo(self) -> None:
        """Put everything back."""
        for place, name, own in self._before:
            _put(place, name, own)
        self._before.clear()


def _put(place: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        place.pop(name, None)
    else:
        place[name] = value


def _in_half_precision(own: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def rotated(query: Tensor, *others: Any, **named: Any) -> Any:
        is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        return (theirs if is_half else own)(query, *others, **named)

    return rotated
