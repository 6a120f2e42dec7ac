"""Policy: a Hugging Face causal language model as the trainer sees it, log-probs of completions and named tensors.

Parameters are float32 whatever the compute dtype. Owns the check that the head is a plain linear layer; does not know
losses, optimizers or storage.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.learning.batching import TokenBatch
from tasks.learning.config import TrainerConfig
from tasks.learning.scoring import Scorer
from tasks.learning.trained_model import PolicyError, TrainedModel, read_model_config, training_device


class Policy(TrainedModel):
    """A causal language model on one device. Not thread-safe.

    Args:
        model_dir: A directory with the model's config.json.
        tensors: Name -> values, Hugging Face names; a tied tensor may be given under any of its names.
        config: dtype, device and gradient_checkpointing are used.
        trainable: False for a reference policy, which then holds no gradients.

    Raises:
        PolicyError: No such model, a head that is not a plain linear layer, or tensors of other names or shapes.
    """

    def __init__(
        self, model_dir: str | Path, tensors: Mapping[str, Tensor], config: TrainerConfig, *, trainable: bool = True
    ) -> None:
        module = _build(Path(model_dir), training_device(config.device))
        super().__init__(module, tensors, config, trainable=trainable)
        _check_head(module)
        self._scorer = Scorer(module, torch.bfloat16 if config.dtype == "bfloat16" else None)

    def logprobs(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the completion tokens under softmax(logits / temperature), and entropies.

        Temperature 0 (greedy) counts as 1, as in the sampler.

        Args:
            batch: B responses, completions padded to T.
            temperature: At least 0.

        Returns:
            Log-probs [B, T] with gradient, and entropies [B, T] in nats without; both 0 on padding, on `device`.
        """
        logprobs, entropy = self._scorer(batch.to(self.device), temperature)
        return logprobs, entropy


def _build(model_dir: Path, device: torch.device) -> Any:
    config = read_model_config(model_dir)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - costs seconds, and only here

    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _check_head(module: Any) -> None:
    """Refuse models that do more than a linear layer after the last hidden state: their log-probs would be wrong."""
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise PolicyError(f"model: {type(module).__name__} has no linear head; allowed: causal language models")
    ids = torch.arange(min(4, head.weight.shape[0]), device=head.weight.device)[None, :]
    with torch.no_grad():
        expected = module(input_ids=ids, use_cache=False).logits
        actual = head(module.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if expected.shape != actual.shape or not torch.allclose(expected, actual, rtol=1e-4, atol=1e-4):
        raise PolicyError(f"model: {type(module).__name__} transforms its logits; allowed: models with a linear head")
