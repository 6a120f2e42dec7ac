"""Liger kernels: fused Triton kernels for a Hugging Face model's norms, rotary embedding and gated activation.

The head is not patched, because `tasks.learning.token_objective` computes its loss. The package liger-kernel and a GPU
are needed.
"""

import importlib
import inspect
from typing import Any

import torch

# The parts that are patched if the model has them; Liger's other patches would replace the head or the loss.
PATCHES = {"rope": True, "rms_norm": True, "layer_norm": True, "swiglu": True, "geglu": True}
NOT_PATCHED = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def apply_liger_kernels(model: Any, device: torch.device) -> None:
    """Patch the modules of a model in place; names and parameters stay as they are.

    Liger replaces the rotary embedding for every model of that type in this process, also for existing ones.

    Args:
        model: A Hugging Face causal language model.
        device: The model's device.

    Raises:
        ValueError: There is no GPU, no liger-kernel, or it does not know the model; nothing is changed then.
    """
    if device.type != "cuda":
        raise ValueError(f"use_liger_kernel: value true; allowed on device {str(device)!r}: false, it needs a GPU")
    try:
        patchers = importlib.import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ValueError(
            f"use_liger_kernel: value true; allowed without the package liger-kernel: false ({error})"
        ) from None
    model_type = model.config.model_type
    if model_type not in patchers:
        raise ValueError(
            f"use_liger_kernel: value true; allowed with a model of type {model_type!r}: false, "
            "Liger has no kernels for it"
        )
    patch = patchers[model_type]
    patch(model=model, **options_of(patch))


def options_of(patch: Any) -> dict[str, bool]:
    """The arguments for one of Liger's patch functions that switch kernels on and off, as far as it has them."""
    known = inspect.signature(patch).parameters
    return {name: value for name, value in (PATCHES | NOT_PATCHED).items() if name in known}
