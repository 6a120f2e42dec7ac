"""Critic: a model of its own that predicts, before each token, the return of the rest of a response.

It is the policy's pretrained body with one linear output, which is zero at first.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.learning.batching import TokenBatch
from tasks.learning.config import TrainerConfig
from tasks.learning.ranks import Ranks
from tasks.learning.scoring import Valuer
from tasks.learning.sharded import skeleton
from tasks.learning.trained_model import TrainedModel, compute_dtype, read_model_config, training_device


class Critic(TrainedModel):
    """A value model on one device, or divided among ranks. Not thread-safe.

    Its tensors are named model.<name in the body> and value_head.{weight,bias}.

    Args:
        model_dir: A directory with the policy's config.json.
        tensors: As returned by `tensors()`.
        config: dtype, device and gradient_checkpointing are used.
        ranks: The ranks that train it; default: this process alone, on the device of the configuration.

    Raises:
        PolicyError: The model does not exist, or the tensors have other names or shapes.
    """

    def __init__(
        self,
        model_dir: str | Path,
        tensors: Mapping[str, Tensor],
        config: TrainerConfig,
        *,
        ranks: Ranks | None = None,
    ) -> None:
        ranks = ranks or Ranks(device=training_device(config.device))
        with skeleton(ranks):
            module = Valuer(_body(Path(model_dir)), compute_dtype(config))
        super().__init__(module, tensors, config, ranks=ranks)

    @classmethod
    def of_policy(
        cls,
        model_dir: str | Path,
        tensors: Mapping[str, Tensor],
        config: TrainerConfig,
        *,
        ranks: Ranks | None = None,
    ) -> "Critic":
        """An untrained critic: the body of a policy's `tensors`, and a head whose values are zero."""
        with torch.device("meta"):
            body = _body(Path(model_dir))
        prefix = f"{body.base_model_prefix}."
        names = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        hidden = body.get_input_embeddings().weight.shape[1]
        head = {"value_head.weight": torch.zeros(1, hidden), "value_head.bias": torch.zeros(1)}
        return cls(model_dir, {f"model.{name}": tensor for name, tensor in names.items()} | head, config, ranks=ranks)

    def values(self, batch: TokenBatch) -> Tensor:
        """The value V(t) before each completion token t: [B, T] float32 with gradient, 0 on padding, on `device`."""
        values: Tensor = self.module(batch.to(self.device))
        return values


def _body(model_dir: Path) -> Any:
    config = read_model_config(model_dir)
    from transformers import AutoModel  # noqa: PLC0415 - costs seconds, and only here

    return AutoModel.from_config(config, dtype=torch.float32)
