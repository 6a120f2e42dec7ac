"""Policy: a Hugging Face causal language model for the trainer, which needs log-probs and named tensors.

Parameters are float32 whatever the compute dtype. This module also checks that the head is a plain linear layer.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import TokenBatch
from tasks.learning.liger import apply_liger_kernels
from tasks.learning.ranks import Ranks
from tasks.learning.scoring import Scorer
from tasks.learning.sharded import Stored, skeleton
from tasks.learning.token_objective import TokenLoss
from tasks.learning.trained_model import PolicyError, TrainedModel, compute_dtype, read_model_config, training_device


class Scores(Protocol):
    """A policy or a reference, which give log-probs of tokens."""

    def logprobs(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """As in `Policy`."""


class Policy(TrainedModel):
    """A causal language model on one device, or divided among ranks. Not thread-safe.

    Args:
        model_dir: A directory with the model's config.json.
        tensors: Name -> values, Hugging Face names; a tied tensor may be given under any of its names.
        config: dtype, device, gradient_checkpointing and use_liger_kernel are used.
        trainable: Which parameters have gradients; False for a reference policy.
        ranks: The ranks that train it; default: this process alone, on the device of the configuration.
        adapt: A function that changes the module's layers before it gets its tensors.

    Raises:
        PolicyError: The model does not exist, its head is not a plain linear layer, or tensors have other names or
            shapes.
    """

    def __init__(
        self,
        model_dir: str | Path,
        tensors: Mapping[str, Stored],
        config: TrainerConfig,
        *,
        trainable: bool | Callable[[str], bool] = True,
        ranks: Ranks | None = None,
        adapt: Callable[[Any], None] = lambda _module: None,
    ) -> None:
        ranks = ranks or Ranks(device=training_device(config.device))
        module = _build(Path(model_dir), config, ranks, adapt)
        self._scorer = _CheckedScorer(module, compute_dtype(config))
        super().__init__(module, tensors, config, trainable=trainable, root=self._scorer, ranks=ranks)
        register_fsdp_forward_method(self._scorer, "logits_of_head")
        _check_head(self._scorer, self.device)

    def logprobs(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the tokens in the response mask under softmax(logits / temperature), and entropies.

        A temperature of 0 (greedy) counts as 1, as in the sampler.

        Args:
            batch: B responses, completions padded to T.
            temperature: At least 0.

        Returns:
            Log-probs [B, T] with gradient, and entropies [B, T] in nats without; both 0 off the mask, on `device`.
        """
        logprobs, entropy = self._scorer(batch.to(self.device), temperature)
        return logprobs, entropy

    def objective(self, batch: TokenBatch, temperature: float, loss: TokenLoss) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and entropies as in `logprobs`, but without gradient, and the sum of losses, with gradient.

        This saves one product with the head compared to `logprobs`; see `tasks.learning.token_objective`.
        """
        logprobs, entropy, total = self._scorer(batch.to(self.device), temperature, loss)
        return logprobs, entropy, total


class _CheckedScorer(Scorer):
    """A scorer that can also compute the model's own logits, for `_check_head`."""

    def logits_of_head(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The model's logits, and those of its head alone; both [B, L, V]."""
        dtype = self.compute_dtype
        with torch.autocast(input_ids.device.type, dtype=dtype, enabled=dtype is not None):
            hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
            logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
            return logits, self.model.get_output_embeddings()(hidden)


def _build(model_dir: Path, config: TrainerConfig, ranks: Ranks, adapt: Callable[[Any], None]) -> Any:
    architecture = read_model_config(model_dir)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - costs seconds, and only here

    with skeleton(ranks):
        try:
            module = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32, trust_remote_code=False)
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise PolicyError(f"model: no causal language model can be built of {str(model_dir)!r}: {reason}") from None
        if config.use_liger_kernel:
            apply_liger_kernels(module, ranks.device)
        adapt(module)
    return module


def _check_head(scorer: _CheckedScorer, device: torch.device) -> None:
    """Refuse models with more than a linear layer after the last hidden state: their log-probs would be wrong."""
    model: Any = scorer.model
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise PolicyError(f"model: {type(model).__name__} has no linear head; allowed: causal language models")
    ids = torch.arange(min(4, head.weight.shape[0]), device=device)[None, :]
    with torch.no_grad():
        expected, actual = scorer.logits_of_head(ids)
    if isinstance(scorer, FSDPModule):
        scorer.reshard()
    if expected.shape != actual.shape or not torch.allclose(expected, actual, rtol=1e-4, atol=1e-4):
        raise PolicyError(f"model: {type(model).__name__} transforms its logits; allowed: models with a linear head")
