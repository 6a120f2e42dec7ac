"""Critic: the value of what a response has not said yet, token by token, by a model of its own.

It is the policy's pretrained body with one linear output, which begins at zero. Does not know returns, losses or
storage.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.learning.batching import TokenBatch
from tasks.learning.config import TrainerConfig
from tasks.learning.scoring import Valuer
from tasks.learning.trained_model import TrainedModel, read_model_config, training_device


class Critic(TrainedModel):
    """A value model on one device. Not thread-safe.

    Its tensors are called model.<name in the body> and value_head.{weight,bias}.

    Args:
        model_dir: A directory with the policy's config.json.
        tensors: As `tensors()` gives them.
        config: dtype, device and gradient_checkpointing are used.

    Raises:
        PolicyError: No such model, or tensors of other names or shapes.
    """

    def __init__(self, model_dir: str | Path, tensors: Mapping[str, Tensor], config: TrainerConfig) -> None:
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else None
        module = Valuer(_body(Path(model_dir), training_device(config.device)), dtype)
        super().__init__(module, tensors, config)

    @classmethod
    def of_policy(cls, model_dir: str | Path, tensors: Mapping[str, Tensor], config: TrainerConfig) -> "Critic":
        """A critic that has learned nothing yet: the body of a policy's `tensors`, and values of zero."""
        with torch.device("meta"):
            body = _body(Path(model_dir), torch.device("meta"))
        prefix = f"{body.base_model_prefix}."
        names = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        hidden = body.get_input_embeddings().weight.shape[1]
        head = {"value_head.weight": torch.zeros(1, hidden), "value_head.bias": torch.zeros(1)}
        return cls(model_dir, {f"model.{name}": tensor for name, tensor in names.items()} | head, config)

    def values(self, batch: TokenBatch) -> Tensor:
        """V(t) before each completion token t, [B, T] float32 with gradient, 0 on padding, on `device`."""
        values: Tensor = self.module(batch.to(self.device))
        return values


def _body(model_dir: Path, device: torch.device) -> Any:
    config = read_model_config(model_dir)
    from transformers import AutoModel  # noqa: PLC0415 - costs seconds, and only here

    with torch.device(device):
        return AutoModel.from_config(config, dtype=torch.float32)
