"""TrainedModel: a Hugging Face model on one device with float32 parameters, and its tensors by published name.

Owns tied names, and that tensors given are this model's; does not know what the model computes, losses or storage.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.learning.config import TrainerConfig

_NAMES_SHOWN = 5


class PolicyError(ValueError):
    """A model that cannot be trained here, or tensors that are not this model's."""


def training_device(name: str) -> torch.device:
    """The device of TrainerConfig.device; raises PolicyError when a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise PolicyError("device: value 'cuda'; allowed: 'cpu' or 'auto' on a machine without a usable GPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def read_model_config(model_dir: Path) -> Any:
    """The transformers configuration in a model directory, without dropout; raises PolicyError."""
    from transformers import AutoConfig  # noqa: PLC0415 - costs seconds, and only here

    if not (model_dir / "config.json").is_file():
        raise PolicyError(f"model: {str(model_dir)!r} holds no config.json; allowed: a Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(str(model_dir), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise PolicyError(f"model: {str(model_dir / 'config.json')!r} is not understood: {reason}") from None
    # Dropout would make the ratio to the sampling policy random, and resumed training differ.
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


class TrainedModel:
    """A module whose tensors have published names. Not thread-safe.

    Args:
        module: On its device, float32.
        tensors: Name -> values, Hugging Face names; a tied tensor may be given under any of its names.
        config: gradient_checkpointing is used.
        trainable: False for one that is only evaluated, which then holds no gradients.

    Raises:
        PolicyError: Tensors of other names or shapes.
    """

    def __init__(
        self, module: Any, tensors: Mapping[str, Tensor], config: TrainerConfig, *, trainable: bool = True
    ) -> None:
        self.module = module
        self.device: torch.device = next(module.parameters()).device
        self._canonical = _canonical_names(module)
        self.load_tensors(tensors)
        module.requires_grad_(trainable)
        # Layers recompute their activations in training mode only; no dropout is left, so that mode changes nothing.
        module.train()
        if config.gradient_checkpointing and trainable:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, in the model's order; a tied one once, under its first name."""
        return dict(self.module.named_parameters())

    def tensors(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Name -> values for publishing, on the CPU, floating ones as `dtype`; tied tensors once. May share memory."""
        state = self.module.state_dict()
        values = {name: state[name].detach() for name in dict.fromkeys(self._canonical.values())}
        return {name: t.to("cpu", dtype if t.is_floating_point() else t.dtype) for name, t in values.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all values in place; raises PolicyError, with nothing changed, if names or shapes differ."""
        unknown = sorted(set(tensors) - set(self._canonical))
        # A tensor's own name goes last, so that it wins over its aliases.
        ordered = sorted(set(tensors) & set(self._canonical), key=lambda name: self._canonical[name] == name)
        given = {self._canonical[name]: tensors[name] for name in ordered}
        missing = sorted(set(self._canonical.values()) - set(given))
        if unknown or missing:
            raise PolicyError(f"tensors: missing {_shown(missing)}; not of this model {_shown(unknown)}")
        state = self.module.state_dict()
        for name, tensor in given.items():
            if tensor.shape != state[name].shape:
                raise PolicyError(
                    f"tensor {name!r}: shape {tuple(tensor.shape)}; allowed: {tuple(state[name].shape)} (config.json)"
                )
        with torch.no_grad():
            for name, tensor in given.items():
                state[name].copy_(tensor)


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of the state -> the name its tensor is published under (the first of a tied parameter's names)."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}
    return {name: names.get(name, name) for name in module.state_dict()}


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(repr(name) for name in names[:_NAMES_SHOWN]) or "none") + more
