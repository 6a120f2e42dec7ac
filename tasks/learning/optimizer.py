"""The optimizer of a policy: a learning-rate schedule and clipping, applied to an accumulated, undivided gradient.

Parameters may be divided among ranks: each rank then updates its part, after clipping by the norm of the whole
gradient. The optimizer keeps the state of each parameter, on the device or on the host, and the number of steps taken;
`tasks.learning.optimizer_rules` updates by it.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from storage.errors import GleanerError
from tasks.configuration.optimizer import OptimizerConfig, OptimizerName
from tasks.configuration.trainer import Offload
from tasks.learning.optimizer_rules import RULES, AdamW, Rule, State, is_hidden_matrix
from tasks.learning.sharded import Relocate, Stored, as_sharded, copy_stored, own_part, part_of, whole

# By kind, as `tasks.learning.optimizer_rules` names them, and by parameter.
Moments = dict[str, dict[str, Stored]]
_CLIP_EPS = 1e-6
_RESPONSES_SHOWN = 16
# A slab of page-locked memory; torch rounds page-locked memory up to a power of two, so a slab wastes nothing.
SLAB_BYTES = 1 << 30
_ALIGNED = 256


class NonFiniteGradient(GleanerError, ArithmeticError):  # noqa: N818 - reads as what happened
    """The loss or its gradient is infinite or not a number; weights are unchanged and the gradient is dropped.

    Attributes:
        quantity: What is not finite, such as "gradient".
        responses: The ids of the responses that may have caused the error.
    """

    def __init__(self, quantity: str, responses: Sequence[int]) -> None:
        self.quantity = quantity
        self.responses = tuple(responses)
        more = len(self.responses) - _RESPONSES_SHOWN
        shown = ", ".join(str(response) for response in self.responses[:_RESPONSES_SHOWN])
        super().__init__(f"non-finite {quantity}; responses {shown}{f' and {more} more' if more > 0 else ''}")


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of one optimizer step.

    Attributes:
        grad_norm: The gradient's 2-norm before clipping.
        learning_rate: The learning rate of the step.
    """

    grad_norm: float
    learning_rate: float


def learning_rate(step: int, config: OptimizerConfig) -> float:
    """The learning rate of optimizer step `step` (counted from 0): linear warm-up, then the schedule.

    "linear" and "cosine" (arXiv 1608.03983, equation 5, without restarts) fall from the peak at the end of the warm-up
    to 0 at total_steps and stay there.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    remaining = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * remaining


class PolicyOptimizer:
    """The configured optimizer over named parameters.

    Args:
        parameters: Name -> parameter; a step updates the parameters that have a gradient.
        config: Kind, rates, schedule and clipping.
        outer: The names of embeddings and heads, which Muon does not update; needed by "muon" alone.
        offload: "optimizer" keeps the state in the host's memory, and moves the state of one parameter at a time to the
            device. The updates equal those without offload to the last bit.

    Raises:
        ValueError: The kind needs a package that is not installed.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        outer: Collection[str] | None = None,
        offload: Offload = "none",
    ) -> None:
        self._parameters = dict(parameters)
        self._config = config
        self._is_offloaded = offload == "optimizer"
        self._steps = 0
        self._rules = self._choose(outer)
        # Created now instead of at the first step, so that a checkpoint always has the same tensors.
        self._states: dict[str, State] = self._begin()

    @property
    def steps(self) -> int:
        """Optimizer steps taken since the beginning of the run."""
        return self._steps

    @property
    def name(self) -> OptimizerName:
        """The kind, OptimizerConfig.name."""
        return self._config.name

    def step(self, denominator: float, responses: Sequence[int] = ()) -> StepOutcome:
        """Divide the accumulated gradient by `denominator`, clip it, update the parameters, drop the gradient.

        Clipping scales the gradient by min(1, max_grad_norm / (norm + 1e-6)).

        Args:
            denominator: See `tasks.learning.loss.denominator`.
            responses: The responses of the gradient, for the error's message.

        Raises:
            NonFiniteGradient: The gradient's norm is not finite; parameters and moments are unchanged.
            ValueError: No parameter has a gradient.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not gradients:
            raise ValueError("optimizer step: no parameter has a gradient")
        norm = float(whole(torch.nn.utils.get_total_norm(gradients))) / denominator
        if not math.isfinite(norm):
            self.drop_gradient()
            raise NonFiniteGradient("gradient", responses)
        clip = min(1.0, self._config.max_grad_norm / (norm + _CLIP_EPS))
        torch._foreach_mul_(gradients, clip / denominator)
        rate = learning_rate(self._steps, self._config)
        for rule, names in self._updates():
            self._update(rule, [name for name in names if self._parameters[name].grad is not None], rate)
        if self._is_offloaded and gradients[0].device.type == "cuda":
            # What was copied to the host is read there, as by a checkpoint.
            torch.cuda.synchronize(gradients[0].device)
        self._steps += 1
        self.drop_gradient()
        return StepOutcome(grad_norm=norm, learning_rate=rate)

    def drop_gradient(self) -> None:
        """Drop the accumulated gradient."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def moment_headers(self) -> dict[str, Tensor]:
        """The names of `each_moment`, in its order -> shape and dtype, on the device meta."""
        found = {}
        for kind in self._kinds():
            for name, state in self._states.items():
                if kind in state:
                    shape, dtype = self._shape(name, kind), state[kind].dtype
                    found[f"{kind}.{name}"] = torch.empty(shape, dtype=dtype, device="meta")
        return found

    def each_moment(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's state as ("<kind>.<parameter>", whole tensor), each tensor gathered when reached.

        With several ranks, every rank must iterate to the end. With one rank, the tensors are the optimizer's own
        memory.
        """
        for full_name in self.moment_headers():
            kind, _, name = full_name.partition(".")
            yield (
                full_name,
                whole(as_sharded(self._states[name][kind], self._parameters[name], self._shape(name, kind))),
            )

    def state_tensors(self) -> Iterator[Tensor]:
        """Every tensor of the optimizer's state, as this rank's rows."""
        for state in self._states.values():
            yield from state.values()

    def relocate(self, to: Relocate) -> None:
        """Replace every tensor of the state by the result of `to`; a state offloaded to the host stays."""
        if not self._is_offloaded:
            for state in self._states.values():
                state.update({kind: to(tensor) for kind, tensor in state.items()})

    def restore(self, steps: int, moments: Moments) -> None:
        """Continue after `steps` steps with `moments`; each rank takes its rows.

        Raises ValueError, with nothing changed, if names or shapes differ.
        """
        pairs: list[tuple[str, str, Stored]] = []
        for kind in [*dict.fromkeys([*self._kinds(), *moments])]:
            own, given = {n for n, state in self._states.items() if kind in state}, moments.get(kind, {})
            if own != given.keys():
                raise ValueError(f"{kind}: names differ from the model's: {sorted(own ^ given.keys())[:5]}")
            for name, values in given.items():
                shape = self._shape(name, kind)
                if tuple(values.shape) != shape:
                    raise ValueError(f"{kind} {name!r}: shape {tuple(values.shape)}; allowed: {shape}")
                pairs.append((kind, name, values))
        with torch.no_grad():
            for kind, name, values in pairs:
                copy_stored(self._states[name][kind], values, self._parameters[name])
        self._steps = steps

    def _choose(self, outer: Collection[str] | None) -> dict[str, Rule]:
        """The rule of each parameter."""
        named, adamw = RULES[self._config.name](self._config), AdamW(self._config)
        if self._config.name != "muon":
            return dict.fromkeys(self._parameters, named)
        if outer is None:
            raise ValueError("outer: None; allowed with optimizer.name 'muon': the names of embeddings and heads")
        return {
            name: named if is_hidden_matrix(tuple(p.shape), is_outer=name in outer) else adamw
            for name, p in self._parameters.items()
        }

    def _begin(self) -> dict[str, State]:
        """Zeros for each parameter's state, this rank's rows, in the memory where the state stays."""
        wanted: dict[tuple[str, str], tuple[tuple[int, ...], torch.dtype]] = {}
        for name, parameter in self._parameters.items():
            rows = own_part(parameter).shape[:1]
            for kind, (shape, dtype) in self._rules[name].state_shapes(tuple(parameter.shape)).items():
                wanted[name, kind] = ((*rows, *shape[1:]), dtype or parameter.dtype)
        devices = {name: own_part(parameter).device for name, parameter in self._parameters.items()}
        if self._is_offloaded:
            pinned = any(device.type == "cuda" for device in devices.values())
            zeros = host_zeros(list(wanted.values()), pinned=pinned)
        else:
            zeros = [
                torch.zeros(shape, dtype=dtype, device=devices[name]) for (name, _), (shape, dtype) in wanted.items()
            ]
        states: dict[str, State] = {name: {} for name in self._parameters}
        for (name, kind), tensor in zip(wanted, zeros, strict=True):
            states[name][kind] = tensor
        return states

    def _updates(self) -> Iterator[tuple[Rule, list[str]]]:
        """The parameters to update together: one at a time if offloaded or updated by matrix, because of memory."""
        for rule in dict.fromkeys(self._rules.values()):
            names = [name for name, its in self._rules.items() if its is rule]
            yield from ((rule, [name]) for name in names) if self._is_offloaded or rule.by_matrix else [(rule, names)]

    @torch.no_grad()
    def _update(self, rule: Rule, names: Sequence[str], rate: float) -> None:
        updated: dict[str, nn.Parameter] = {}
        states: dict[str, State] = {}
        for name in names:
            parameter = self._parameters[name]
            part = whole if rule.by_matrix else own_part
            updated[name] = nn.Parameter(part(parameter.detach()), requires_grad=False)
            updated[name].grad = part(parameter.grad)  # type: ignore[arg-type]  # names have one
            states[name] = {kind: self._for_rule(rule, name, kind) for kind in self._states[name]}
        if updated:
            rule.update(updated, states, rate, self._steps)
        for name in names:
            parameter = self._parameters[name]
            if rule.by_matrix:
                _copy_back(own_part(parameter.detach()), part_of(updated[name], parameter))
            for kind, own in self._states[name].items():
                tensor = states[name][kind]
                _copy_back(own, part_of(tensor, parameter) if rule.by_matrix else tensor)

    def _for_rule(self, rule: Rule, name: str, kind: str) -> Tensor:
        """A tensor of the state as `rule` needs it: on the parameter's device, and whole for updates by matrix."""
        parameter, state = self._parameters[name], self._states[name][kind]
        if self._is_offloaded:
            # A copy even on a CPU, so that the same path is taken there.
            state = state.to(own_part(parameter).device, non_blocking=True, copy=True)
        return whole(as_sharded(state, parameter, self._shape(name, kind))) if rule.by_matrix else state

    def _shape(self, name: str, kind: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return (*self._parameters[name].shape[:1], *self._states[name][kind].shape[1:])

    def _kinds(self) -> dict[str, None]:
        return dict.fromkeys(kind for state in self._states.values() for kind in state)


def _copy_back(own: Tensor, updated: Tensor) -> None:
    """Copy an updated tensor into the optimizer's or the model's own, unless the update was in place."""
    if own.data_ptr() != updated.data_ptr():
        own.copy_(updated, non_blocking=True)


def host_zeros(
    wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], *, pinned: bool, slab_bytes: int = SLAB_BYTES
) -> list[Tensor]:
    """Zeros of the `wanted` shapes and dtypes in host memory, cut from slabs; `pinned` (page-locked) needs a GPU."""
    found: list[Tensor] = []
    slab, used = torch.empty(0, dtype=torch.uint8), 0
    for shape, dtype in wanted:
        size = math.prod(shape) * dtype.itemsize
        if used + size > slab.numel():
            slab, used = torch.zeros(max(size, slab_bytes), dtype=torch.uint8, pin_memory=pinned), 0
        found.append(slab[used : used + size].view(dtype).view(shape))
        used += -(-size // _ALIGNED) * _ALIGNED
    return found
