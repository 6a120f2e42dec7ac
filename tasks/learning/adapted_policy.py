"""AdaptedPolicy: a policy of which only LoRA adapters are trained; without them it is its own reference.

Published weights are merged, or the adapters alone (`lora.publish`); checkpoints hold the adapters only. This module
names and initialises the adapters' layers, and merges them by `adapter_merge`; peft computes them.
"""

import functools
import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from storage.weights.adapters import FIRST, SECOND, AdapterRecord
from tasks.configuration.lora import LoraConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import TokenBatch
from tasks.learning.policy import Policy
from tasks.learning.ranks import Ranks
from tasks.learning.sharded import Stored, whole
from tasks.learning.trained_model import PolicyError
from tasks.sampling.engines.adapter_merge import merged_weight

_ADAPTER = "default"
_BASE = ".base_layer."
_FIRST, _SECOND = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"


class AdaptedPolicy(Policy):
    """A policy in which only the adapters have gradients.

    Args:
        model_dir: A directory with the model's config.json.
        tensors: The pretrained model's tensors, as for `Policy`.
        config: As for `Policy`.
        lora: The configuration of the adapters.
        seed: The seed of their first factors; the second ones are zero, so that the policy begins as the pretrained
            model.
        ranks: As for `Policy`.

    Raises:
        PolicyError: As for `Policy`; or peft is not installed, or finds no layer to adapt.
    """

    def __init__(
        self,
        model_dir: str | Path,
        tensors: Mapping[str, Stored],
        config: TrainerConfig,
        lora: LoraConfig,
        *,
        seed: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._lora = lora
        self._begin = _Beginning(tensors, seed)
        super().__init__(
            model_dir, {}, config, ranks=ranks, trainable=_is_adapter, adapt=lambda module: _inject(module, lora)
        )

    def load_tensors(self, tensors: Mapping[str, Stored]) -> None:
        """Replace all values; without `tensors`, by the pretrained model's and the adapters' initial ones."""
        super().load_tensors(tensors or self._begin.tensors(self.module))

    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters."""
        return {name: parameter for name, parameter in super().parameters().items() if _is_adapter(name)}

    def canonical(self, name: str) -> str:
        """As in `TrainedModel`."""
        return _published(super().canonical(self._within[name]))

    @functools.cached_property
    def _within(self) -> dict[str, str]:
        """Each pretrained tensor's name -> its name in the module with adapters."""
        return {_published(name): name for name in self.module.state_dict() if not _is_adapter(name)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of `tensors()`."""
        return {_published(name): shape for name, shape in super().shapes().items() if not _is_adapter(name)}

    def each_tensor(
        self, dtype: torch.dtype = torch.float32, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The merged weights, W + alpha / rank * B A in float32 on the device, otherwise as in `TrainedModel`."""
        state = self.module.state_dict()
        transposed = self._transposed
        scale = self._lora.alpha / self._lora.rank
        for name in super().shapes():
            if _is_adapter(name):
                continue
            published = _published(name)
            merged = value = whole(state[name].detach())
            layer, is_adapted, leaf = name.partition(_BASE)
            if is_adapted and leaf == "weight":
                first, second = (whole(state[layer + end].detach()) for end in (_FIRST, _SECOND))
                merged = merged_weight(value, first, second, scale, transposed=layer in transposed)
            dtype_here = (dtypes or {}).get(published, dtype)
            yield published, self.on_host(merged.to(dtype_here) if merged.is_floating_point() else merged)

    @property
    def adapter(self) -> AdapterRecord | None:
        """What a weight version says of its adapter, if the adapters are published alone."""
        if self._lora.publish == "merged":
            return None
        return AdapterRecord(rank=self._lora.rank, alpha=self._lora.alpha, transposed=tuple(sorted(self._transposed)))

    def each_factor(self) -> Iterator[tuple[str, Tensor]]:
        """`each_trained` by the names of a published adapter."""
        for name, value in self.each_trained():
            yield name.replace(_FIRST, FIRST).replace(_SECOND, SECOND), value

    @property
    def _transposed(self) -> set[str]:
        """The adapted layers that hold their weights as [inputs, outputs]."""
        return {name for name, layer in self.module.named_modules() if getattr(layer, "fan_in_fan_out", False) is True}

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the adapters' tensors."""
        return {name: shape for name, shape in super().shapes().items() if _is_adapter(name)}

    def each_trained(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters' values, float32 on the CPU, one after the other; a collective like `each_tensor`."""
        state = self.module.state_dict()
        for name in self.trained_shapes():
            yield name, whole(state[name].detach()).to("cpu")

    def load_trained(self, tensors: Mapping[str, Stored]) -> None:
        """Replace the adapters' values."""
        self.load_some(tensors, self.trained_shapes())

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Compute as the pretrained model within the block."""
        layers = [module for module in self.module.modules() if hasattr(module, "enable_adapters")]
        for layer in layers:
            layer._disable_adapters = True  # noqa: SLF001 - enable_adapters would switch gradients, too
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False  # noqa: SLF001


class Pretrained:
    """The reference of an adapted policy: the same model without its adapters, which takes no further memory."""

    def __init__(self, policy: AdaptedPolicy) -> None:
        self._policy = policy

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """As in `Policy`, without gradient."""
        with self._policy.without_adapters():
            return self._policy.logprobs(batch, temperature)


class _Beginning:
    """The initial values of an adapted model: the pretrained ones, and adapters that change nothing yet."""

    def __init__(self, tensors: Mapping[str, Stored], seed: int) -> None:
        self._tensors = tensors
        self._seed = seed

    def tensors(self, module: Any) -> dict[str, Stored]:
        state = module.state_dict()
        within = {_published(name): name for name in state}
        values = {within.get(name, name): tensor for name, tensor in self._tensors.items()}
        self._tensors = {}
        for name, value in state.items():
            if name.endswith(_FIRST):
                values[name] = self._first(name, tuple(value.shape))
            elif name.endswith(_SECOND):
                values[name] = torch.zeros(tuple(value.shape))
        return values

    def _first(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Uniform within +-1 / sqrt(inputs), as in peft; seeded by name, so that ranks and versions do not matter."""
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        bound = 1 / math.sqrt(shape[1])
        return (torch.rand(shape, generator=generator) * 2 - 1) * bound


def _inject(module: Any, lora: LoraConfig) -> None:
    try:
        import peft  # noqa: PLC0415 - an extra, and slow
    except ImportError:
        raise PolicyError("lora: peft is not installed; allowed: null, or `pip install peft`") from None
    _check_targets(module, lora.target_modules)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast("Any", lora.alpha),  # an int only by its annotation
        target_modules=list(lora.target_modules) or "all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft finds out by itself which layers hold their weights transposed.
            warnings.filterwarnings("ignore", "fan_in_fan_out")
            peft.inject_adapter_in_model(settings, module, adapter_name=_ADAPTER)
    except ValueError as error:
        raise PolicyError(f"lora.target_modules: {error}") from None


def _check_targets(module: Any, targets: Sequence[str]) -> None:
    """Refuse layers that are not linear: peft adapts them in other ways, which are not merged here."""
    head = module.get_output_embeddings()
    for name, layer in module.named_modules():
        chosen = any(name == target or name.endswith(f".{target}") for target in targets)
        if chosen and layer is head:
            raise PolicyError(f"lora.target_modules: {name} is the head; allowed: linear layers before it")
        if chosen and not (isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"):
            raise PolicyError(f"lora.target_modules: {name} is of type {type(layer).__name__}; allowed: linear layers")


def _is_adapter(name: str) -> bool:
    return name.endswith((_FIRST, _SECOND))


def _published(name: str) -> str:
    return name.replace(_BASE, ".")
