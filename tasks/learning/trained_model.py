"""TrainedModel: a Hugging Face model with float32 parameters, whole or sharded, and its tensors by the module's names.

With a compute dtype other than float32, the module has parameter copies in the compute dtype
(`tasks.learning.compute_copy`). A tied tensor has its first name. Loading checks names and shapes of tensors against
the model. `tasks.models.stored_names` knows the names of a policy's tensors in weight versions.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from storage.errors import WrongInputError
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.compute_copy import ComputeCopy
from tasks.learning.ranks import Ranks
from tasks.learning.sharded import Relocate, Stored, break_off, copy_stored, shard, whole
from tasks.models.configuration import ModelConfigurationError, read_model_config
from tasks.models.stored_names import own_names

_NAMES_SHOWN = 5


class PolicyError(WrongInputError):
    """The model cannot be trained here, or tensors are not this model's."""


def training_device(name: str) -> torch.device:
    """The device of TrainerConfig.device; raises PolicyError if a GPU is requested and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise PolicyError("device: value 'cuda'; allowed: 'cpu' or 'auto' on a machine without a usable GPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def compute_dtype(config: TrainerConfig) -> torch.dtype | None:
    """The dtype of passes, in which the module's parameters are copied; None takes that of the parameters."""
    return torch.bfloat16 if config.dtype == "bfloat16" else None


def read_architecture(model_dir: Path) -> Any:
    """The transformers configuration in a model directory, as `read_model_config`; raises PolicyError."""
    try:
        return read_model_config(model_dir)
    except ModelConfigurationError as error:
        raise PolicyError(f"model: {error}") from None


class TrainedModel:
    """A module with named tensors. Not thread-safe.

    Args:
        module: A float32 module on its device; for several ranks, one made in `tasks.learning.sharded.skeleton`.
        tensors: Name -> values, with the module's names; a tied tensor may have any of its names. With several ranks,
            values are this rank's rows, or whole tensors.
        config: dtype and gradient_checkpointing are used.
        trainable: Selects the parameters that have gradients, by name; False for a model that is only evaluated. A
            parameter without gradient exists in the compute dtype only, without float32 master, if the model is only
            evaluated, or if the stored dtype is the compute dtype, so that the stored bits are published.
        uncopied: Modules that compute in float32 whatever the compute dtype.
        root: The module whose `forward` alone reads parameters: `module` (the default), or a module around `module`.
        ranks: The ranks that train the model; each of several ranks holds a part of every tensor.

    Raises:
        PolicyError: The tensors have other names or shapes.
    """

    def __init__(
        self,
        module: Any,
        tensors: Mapping[str, Stored],
        config: TrainerConfig,
        *,
        trainable: bool | Callable[[str], bool] = True,
        uncopied: Collection[nn.Module] = (),
        root: nn.Module | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.module = module
        self._root: nn.Module = root or module
        self._is_first = ranks is None or ranks.is_first
        self._canonical = own_names(module)
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        self._heads = [*uncopied, *([] if head is None else [head])]
        dtype = compute_dtype(config)
        stored = {} if dtype is None or trainable is True else self._stored_dtypes()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trainable(name) if callable(trainable) else trainable)
            frozen = not parameter.requires_grad and dtype is not None and (not trainable or stored.get(name) == dtype)
            parameter.data = parameter.data.to(dtype if frozen else torch.float32)
        self._copy: ComputeCopy | None = None
        if ranks is not None and ranks.world_size > 1:
            shard(self._root, ranks, dtype, uncopied)
        elif dtype is not None and trainable:
            self._copy = ComputeCopy(self._root, dtype, uncopied)
        self.device: torch.device = next(module.parameters()).device
        self.load_tensors(tensors)
        _compute_as_sampled(module)
        if config.gradient_checkpointing and trainable:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter, in the model's order; a tied parameter occurs once, under its first name."""
        return {name: self._master(parameter) for name, parameter in self.module.named_parameters()}

    def outer_parameters(self) -> set[str]:
        """The names of the parameters of embeddings and heads."""
        module = self.module
        outer = [part for part in module.modules() if isinstance(part, nn.Embedding)] + self._heads
        ids = {id(parameter) for part in outer for parameter in part.parameters()}
        return {name for name, parameter in module.named_parameters() if id(parameter) in ids}

    def state(self) -> dict[str, Tensor]:
        """Name -> values of every parameter and buffer, sharing memory; a tied tensor occurs under all its names."""
        state = self.module.state_dict(keep_vars=True)
        return {name: self._master(value).detach() for name, value in state.items()}

    def memory(self) -> Iterator[Tensor]:
        """Every tensor in the model's memory, gradients excepted, each once."""
        kept = chain(self.module.parameters(), self._masters(), self.module.buffers())
        yield from {id(tensor): tensor for tensor in kept}.values()

    def drop_gradient(self) -> None:
        """Drop the accumulated gradient."""
        for parameter in self._masters():
            parameter.grad = None

    def break_off(self) -> None:
        """Prepare for the next pass after a pass that raised on every rank; every rank must call `break_off`."""
        break_off(self._root)
        self.drop_gradient()

    def _stored_dtypes(self) -> Mapping[str, torch.dtype]:
        """The stored dtypes of untrained parameters, by name, as far as known."""
        return {}

    def _masters(self) -> Iterator[nn.Parameter]:
        yield from map(self._master, self.module.parameters())

    def _master(self, value: Any) -> Any:
        return value if self._copy is None else self._copy.master(value)

    def tensors(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Name -> values on the first rank's CPU, floating ones in `dtype`, tied tensors once.

        Values may share memory with parameters. Every rank must call `tensors` and gets all tensors; a rank without
        need for tensors iterates over `each_tensor` instead.
        """
        return dict(self.each_tensor(dtype))

    def each_tensor(
        self, dtype: torch.dtype = torch.float32, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the items of `tensors()`, in equal order on every rank, each tensor gathered when reached.

        Every rank must iterate to the end at the same time. Only the first rank, which stores tensors, gets tensors on
        the CPU; elsewhere tensors stay on the device. `dtypes`: exceptions from `dtype`, by name.
        """
        state = self.state()
        for name in dict.fromkeys(self._canonical.values()):
            value = state[name]
            dtype_here = (dtypes or {}).get(name, dtype)
            # Cast before it is gathered, so that fewer bytes go between ranks.
            yield name, self.on_host(whole(value.to(dtype_here) if value.is_floating_point() else value))

    def on_host(self, tensor: Tensor) -> Tensor:
        """Move a whole tensor to the CPU on the first rank; on other ranks, return the tensor without a copy."""
        return tensor.to("cpu") if self._is_first else tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of `tensors()`, in order, without gathering."""
        state = self.state()
        return {name: tuple(state[name].shape) for name in dict.fromkeys(self._canonical.values())}

    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that training changes and a checkpoint holds: all tensors in this class."""
        return self.shapes()

    def each_trained(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that training changes, in float32; otherwise as `each_tensor`."""
        return self.each_tensor()

    def relocate(self, to: Relocate) -> None:
        """Replace the memory of all parameters and buffers by the result of `to`; parameter objects stay."""
        if self._copy is not None:
            self._copy.relocate(to)
        # What `Module.to` calls. A sharded module also learns of its new memory by it.
        self._root._apply(to)  # type: ignore[no-untyped-call]  # noqa: SLF001

    def load_trained(self, tensors: Mapping[str, Stored]) -> None:
        """Replace the tensors that training changes; PolicyError, with nothing changed, if names or shapes differ."""
        self.load_some(tensors, set(self._canonical.values()))

    def load_tensors(self, tensors: Mapping[str, Stored]) -> None:
        """Replace all values in place; raises PolicyError, with nothing changed, if names or shapes differ."""
        self.load_trained(tensors)

    def load_some(self, tensors: Mapping[str, Stored], names: Collection[str]) -> None:
        """Replace the values of the tensors `names`; PolicyError, with nothing changed, if names or shapes differ."""
        known = {name for name, canonical in self._canonical.items() if canonical in names}
        unknown = sorted(set(tensors) - known)
        # A tensor's first name goes last, so that it wins over its others.
        ordered = sorted((name for name in tensors if name in known), key=lambda name: self._canonical[name] == name)
        given = {self._canonical[name]: tensors[name] for name in ordered}
        missing = sorted(set(names) - set(given))
        if unknown or missing:
            raise PolicyError(f"tensors: missing {_shown(missing)}; not of this model {_shown(unknown)}")
        state = self.state()
        for name, tensor in given.items():
            if tensor.shape != state[name].shape:
                raise PolicyError(
                    f"tensor {name!r}: shape {tuple(tensor.shape)}; allowed: {tuple(state[name].shape)} (config.json)"
                )
        self._replace(given.items())

    @torch.no_grad()
    def _replace(self, tensors: Iterable[tuple[str, Stored]]) -> None:
        """Replace values in place, by the module's names; names and shapes have been checked."""
        state = self.state()
        for name, tensor in tensors:
            copy_stored(state[name], tensor)


def _compute_as_sampled(module: nn.Module) -> None:
    """Put modules into evaluation mode, in which no router and no dropout draws random numbers.

    Models and layers stay in training mode, because activations are recomputed in training mode only.
    """
    from transformers import PreTrainedModel  # noqa: PLC0415 - costs seconds
    from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: PLC0415

    for part in module.modules():
        part.training = isinstance(part, PreTrainedModel | GradientCheckpointingLayer)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(repr(name) for name in names[:_NAMES_SHOWN]) or "none") + more
