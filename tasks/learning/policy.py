"""Policy: a Hugging Face causal language model as the trainer sees it, log-probs of completions and named tensors.

Parameters are float32 whatever the compute dtype. Owns tied names and the check that the head is a plain linear layer;
does not know losses, optimizers or storage.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.learning.batching import TokenBatch
from tasks.learning.config import TrainerConfig
from tasks.learning.token_logprobs import token_logprobs

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


class Policy:
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
        self.device = training_device(config.device)
        self._compute_dtype = torch.bfloat16 if config.dtype == "bfloat16" else None
        self.module = _build(Path(model_dir), self.device)
        self._canonical = _canonical_names(self.module)
        self.load_tensors(tensors)
        _check_head(self.module)
        self.module.requires_grad_(trainable)
        # Layers recompute their activations in training mode only; no dropout is left, so that mode changes nothing.
        self.module.train()
        if config.gradient_checkpointing and trainable:
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, in the model's order; a tied one once, under its first name."""
        return dict(self.module.named_parameters())

    def logprobs(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs of the completion tokens under softmax(logits / temperature), and entropies.

        Temperature 0 (greedy) counts as 1, as in the sampler.

        Args:
            batch: B responses, completions padded to T.
            temperature: At least 0.

        Returns:
            Log-probs [B, T] with gradient, and entropies [B, T] in nats without; both 0 on padding, on `device`.
        """
        batch = batch.to(self.device)
        # Padding is on the right of a causal model: no token that is read sees it, so no attention mask is needed.
        with torch.autocast(self.device.type, dtype=self._compute_dtype, enabled=self._compute_dtype is not None):
            hidden = self.module.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        rows, columns = batch.response_mask.nonzero(as_tuple=True)
        # The token at prompt_length + t is predicted by the position before it.
        positions = rows * batch.input_ids.shape[1] + batch.prompt_lengths[rows] + columns - 1
        picked = hidden.flatten(0, 1).index_select(0, positions).to(self._compute_dtype or hidden.dtype)
        head = self.module.get_output_embeddings()
        targets = batch.completion_ids[batch.response_mask]
        flat = token_logprobs(picked, head.weight, head.bias, targets, temperature=temperature or 1.0)
        logprobs, entropy = (
            value.new_zeros(batch.response_mask.shape).masked_scatter(batch.response_mask, value) for value in flat
        )
        return logprobs, entropy

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


def _build(model_dir: Path, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - costs seconds, and only here

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
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of the state -> the name its tensor is published under (the first of a tied parameter's names)."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}
    return {name: names.get(name, name) for name in module.state_dict()}


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


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(repr(name) for name in names[:_NAMES_SHOWN]) or "none") + more
