"""Liger kernels: fused Triton kernels for a Hugging Face model's norms, rotary embedding and gated activation.

The head stays as it is: its loss is `tasks.learning.token_objective`'s. Needs the package liger-kernel, and a GPU.
"""

import importlib
import inspect
from typing import Any

import torch

# What is patched where the model has it; anything else of Liger's would replace the head or the loss.
PATCHES = {"rope": True, "rms_norm": True, "layer_norm": True, "swiglu": True, "geglu": True}
NOT_PATCHED = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def apply_liger_kernels(model: Any, device: torch.device) -> None:
    """Patch the modules of a model in place; names and parameters stay as they are.

    Liger replaces the rotary embedding for every model of that type in this process, also for those made before.

    Args:
        model: A Hugging Face causal language model.
        device: Where it computes.

    Raises:
        ValueError: No GPU, no liger-kernel, or a model that it does not know; nothing is changed then.
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
    """Which of its kernels a patch function of Liger's is told to apply, as far as it knows them."""
    known = inspect.signature(patch).parameters
    return {name: value for name, value in (PATCHES | NOT_PATCHED).items() if name in known}
