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
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from storage.weights.adapters import FIRST, SECOND, AdapterRecord
from tasks.configuration.lora import LoraConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import TokenBatch
from tasks.learning.policy import Policy, names_in, own_tensors
from tasks.learning.ranks import Ranks
from tasks.learning.sharded import Stored, header, whole
from tasks.learning.trained_model import PolicyError
from tasks.sampling.engines.adapter_merge import merged_weight

_ADAPTER = "default"
_BASE = ".base_layer."
_OF_LINEAR = ("weight", "bias")
_FIRST, _SECOND = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"


class AdaptedPolicy(Policy):
    """A policy in which only the adapters have gradients.

    Args:
        model_dir: A directory with the model's config.json.
        tensors: The pretrained model's tensors, as for `Policy`.
        config: As for `Policy`.
        lora: The configuration of the adapters.
        seed: The seed of the adapters' first factors; second factors are zero, so that the policy begins as the
            pretrained model.
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
            model_dir,
            {},
            config,
            ranks=ranks,
            trainable=_is_adapter,
            adapt=lambda module: inject_adapters(module, lora),
        )

    def load_tensors(self, tensors: Mapping[str, Stored]) -> None:
        """Replace the pretrained model's values, without `tensors` by those of the constructor, and the adapters'."""
        given = tensors or self._begin.pretrained()
        if self.adapter is not None:
            self._check_adapted_names(given)
        own = ((self._within[name], tensor) for name, tensor in own_tensors(self._architecture, given))
        self._replace(chain(own, self._begin.adapters(self.state())))

    def _check_adapted_names(self, tensors: Mapping[str, Stored]) -> None:
        """Raise PolicyError if an adapted layer has another name in the checkpoint: readers merge by its names."""
        names = names_in(self._architecture, {name: header(tensor) for name, tensor in tensors.items()})
        for own, name in self._within.items():
            if _BASE in name and names.stored_name(own) != own:
                raise PolicyError(
                    f"lora.publish: value 'adapter', and the model's files have no {own!r}, as transformers calls the "
                    "weight of an adapted layer; allowed: merged"
                )

    def _stored_dtypes(self) -> Mapping[str, torch.dtype]:
        names = names_in(self._architecture, self._begin.headers())
        return {self._within[name]: dtype for name, dtype in names.dtypes.items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters."""
        return {name: parameter for name, parameter in super().parameters().items() if _is_adapter(name)}

    @functools.cached_property
    def _within(self) -> dict[str, str]:
        """Each pretrained tensor's name -> its name in the module with adapters."""
        return {_unadapted(name): name for name in self.module.state_dict() if not _is_adapter(name)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of `tensors()`."""
        return {_unadapted(name): shape for name, shape in super().shapes().items() if not _is_adapter(name)}

    def each_tensor(
        self, dtype: torch.dtype = torch.float32, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The merged weights, W + alpha / rank * B A in float32 on the device, otherwise as in `TrainedModel`."""
        state = self.state()
        transposed = self._transposed
        scale = self._lora.alpha / self._lora.rank
        for name in super().shapes():
            if _is_adapter(name):
                continue
            own = _unadapted(name)
            merged = value = whole(state[name])
            layer, is_adapted, leaf = name.partition(_BASE)
            if is_adapted and leaf == "weight":
                first, second = (whole(state[layer + end]) for end in (_FIRST, _SECOND))
                merged = merged_weight(value, first, second, scale, transposed=layer in transposed)
            dtype_here = (dtypes or {}).get(own, dtype)
            yield own, self.on_host(merged.to(dtype_here) if merged.is_floating_point() else merged)

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
        """The names of adapted layers whose weights are stored as [inputs, outputs]."""
        return {name for name, layer in self.module.named_modules() if getattr(layer, "fan_in_fan_out", False) is True}

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the adapters' tensors."""
        return {name: shape for name, shape in super().shapes().items() if _is_adapter(name)}

    def each_trained(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters' values in float32; otherwise as `each_tensor`."""
        state = self.state()
        for name in self.trained_shapes():
            yield name, self.on_host(whole(state[name]))

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
    """The reference of an adapted policy: the policy's own model with adapters switched off, without further memory."""

    def __init__(self, policy: AdaptedPolicy) -> None:
        self._policy = policy

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """As in `Policy`, without gradient."""
        with self._policy.without_adapters():
            return self._policy.logprobs(batch, temperature)


class _Beginning:
    """The initial values of an adapted model: the pretrained tensors, and adapters whose product is zero."""

    def __init__(self, tensors: Mapping[str, Stored], seed: int) -> None:
        self._tensors: Mapping[str, Stored] = tensors
        self._seed = seed

    def headers(self) -> dict[str, Tensor]:
        """The pretrained model's shapes and dtypes, on the device meta."""
        return {name: header(tensor) for name, tensor in self._tensors.items()}

    def pretrained(self) -> Mapping[str, Stored]:
        """The pretrained model's tensors; a second call returns {}, because the memory is given away."""
        tensors, self._tensors = self._tensors, {}
        return tensors

    def adapters(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The adapters' tensors, by the names of a state that has them."""
        for name, value in state.items():
            if name.endswith(_FIRST):
                yield name, self._first(name, tuple(value.shape))
            elif name.endswith(_SECOND):
                yield name, torch.zeros(tuple(value.shape))

    def _first(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Uniform within +-1 / sqrt(inputs), as in peft; seeded by name, so that ranks and versions do not matter."""
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        bound = 1 / math.sqrt(shape[1])
        return (torch.rand(shape, generator=generator) * 2 - 1) * bound


def inject_adapters(module: Any, lora: LoraConfig) -> None:
    """Give the linear layers of a module their adapters, in place; raises PolicyError."""
    try:
        import peft  # noqa: PLC0415 - an extra, and slow
    except ImportError:
        raise PolicyError("lora: peft is not installed; allowed: null, or `pip install peft`") from None
    _check_targets(module, lora.target_modules)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast("Any", lora.alpha),  # an int only by its annotation
        target_modules=list(lora.target_modules) or _linear_layers(module),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft finds out by itself which layers hold their weights transposed.
            warnings.filterwarnings("ignore", "fan_in_fan_out")
            # Of experts, which are refused below.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
            peft.inject_adapter_in_model(settings, module, adapter_name=_ADAPTER)
    except ValueError as error:
        raise PolicyError(f"lora.target_modules: {error}") from None
    experts = [name for name in module.state_dict() if _BASE in name and name.rpartition(_BASE)[2] not in _OF_LINEAR]
    if experts:
        name = experts[0].replace(_BASE[:-1], "")
        raise PolicyError(
            f"lora.target_modules: peft would adapt {name}, too, which is no linear layer; allowed: names that no "
            "experts have, such as q_proj"
        )


def _linear_layers(module: Any) -> list[str]:
    """All but the head. peft's own choice, all-linear, has the experts of mixtures, too."""
    head = module.get_output_embeddings()
    layers = [name for name, layer in module.named_modules() if _is_linear(layer) and layer is not head]
    if not layers:
        raise PolicyError("lora.target_modules: the model has no linear layers; allowed: null for lora")
    return layers


def _is_linear(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _check_targets(module: Any, targets: Sequence[str]) -> None:
    """Refuse the head and layers that are not linear; `each_tensor` merges adapters of linear layers only."""
    head = module.get_output_embeddings()
    for name, layer in module.named_modules():
        chosen = any(name == target or name.endswith(f".{target}") for target in targets)
        if chosen and layer is head:
            raise PolicyError(f"lora.target_modules: {name} is the head; allowed: linear layers before it")
        if chosen and not _is_linear(layer):
            raise PolicyError(f"lora.target_modules: {name} is of type {type(layer).__name__}; allowed: linear layers")


def _is_adapter(name: str) -> bool:
    return name.endswith((_FIRST, _SECOND))


def _unadapted(name: str) -> str:
    return name.replace(_BASE, ".")
