"""The kinds of optimizers: the state of a parameter between steps, and the update by code of torch or torchao.

The state of a parameter is a dict from kind to plain tensor (this rank's part), so callers store, move and divide the
state without knowing the optimizer. The caller counts steps.
"""

import importlib
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tasks.configuration.optimizer import OptimizerConfig, OptimizerName

State = dict[str, Tensor]
Shape = tuple[int, ...]
STEP = "step"
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
# Every kind of tensor, and whether it is codes of 8 bits.
KINDS = {
    **dict.fromkeys(MOMENTS, False),
    **{f"{moment}_codes": True for moment in MOMENTS},
    **{f"{moment}_scale": False for moment in MOMENTS},
    MOMENTUM: False,
}
# Blocks lie within rows, so that a division among ranks, which is by rows, changes no block; 64 divides the widths of
# usual models, which 256, the default of torchao, does not (896, 576).
BLOCK = 64


class Rule(Protocol):
    """One kind of optimizer.

    by_matrix: whether an update needs the whole parameter, gradient and state instead of this rank's rows.
    """

    by_matrix: bool

    def state_shapes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype | None]]:
        """Kind -> shape and dtype of the state of a whole parameter; None stands for the parameter's dtype.

        The first dimension is the parameter's.
        """

    def update(
        self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State], rate: float, steps: int
    ) -> None:
        """Update plain parameters, which have a gradient, and their states, in place, after `steps` earlier steps."""


class AdamW:
    """AdamW (arXiv 1711.05101) of torch, with moments in the parameters' dtype; vectors are not decayed."""

    by_matrix = False

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def state_shapes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype | None]]:
        return dict.fromkeys(MOMENTS, (shape, None))

    def update(
        self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State], rate: float, steps: int
    ) -> None:
        config = self._config
        adamw = torch.optim.AdamW(
            _decayed(parameters, config.weight_decay),
            lr=rate,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        for name, parameter in parameters.items():
            counted = torch.full((), float(steps), dtype=torch.float32, device=parameter.device)
            adamw.state[parameter] = {STEP: counted, **states[name]}
        adamw.step()


class AdamW8bit:
    """AdamW of torchao: moments in 8 bits with a float32 scale for each block (arXiv 2110.02861).

    Vectors, and matrices whose rows are no whole number of blocks, keep moments in float32. The update is torchao's:
    compiled on a GPU to save memory, and uncompiled on a CPU, which may lack a compiler.
    """

    by_matrix = False

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._torchao = _torchao()

    def state_shapes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype | None]]:
        if not is_quantised(shape):
            return dict.fromkeys(MOMENTS, (shape, None))
        blocks = (shape[0], math.prod(shape[1:]) // BLOCK)
        found: dict[str, tuple[Shape, torch.dtype | None]] = {}
        for moment in MOMENTS:
            found |= {f"{moment}_codes": (shape, torch.uint8), f"{moment}_scale": (blocks, torch.float32)}
        return found

    def update(
        self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State], rate: float, steps: int
    ) -> None:
        config = self._config
        # A rank may have no row of a parameter.
        held = {name: parameter for name, parameter in parameters.items() if parameter.numel()}
        if not held:
            return
        adamw = self._torchao.optim.AdamW8bit(
            _decayed(held, config.weight_decay),
            lr=rate,
            betas=config.betas,
            eps=config.eps,
            block_size=BLOCK,
        )
        for name, parameter in held.items():
            adamw.state[parameter] = {STEP: torch.tensor(float(steps)), **self._moments(states[name])}
        on_gpu = next(iter(held.values())).device.type == "cuda"
        with nullcontext() if on_gpu else torch.compiler.set_stance("force_eager"):
            adamw.step()

    def _moments(self, state: State) -> dict[str, Tensor]:
        """The moments as torchao's tensors, which share the memory of the state."""
        if MOMENTS[0] in state:
            return {moment: state[moment] for moment in MOMENTS}
        return {moment: self._quantised(state, moment, signed=moment == MOMENTS[0]) for moment in MOMENTS}

    def _quantised(self, state: State, moment: str, *, signed: bool) -> Tensor:
        codes, scale = state[f"{moment}_codes"], state[f"{moment}_scale"].view(-1)
        subclass = self._torchao.optim.subclass_8bit
        values = subclass.get_qmap_signed() if signed else subclass.get_qmap_unsigned()
        table = torch.tensor(values, dtype=torch.float32, device=codes.device)
        found: Tensor = subclass.OptimState8bit(codes, scale, table, signed, dtype=torch.float32)
        return found


class Muon:
    """Muon of torch, for matrices between the embedding and the head: a momentum, made orthogonal.

    The update is scaled to the size of AdamW's (arXiv 2502.16982), so that rates and decays for AdamW hold.
    """

    by_matrix = True

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def state_shapes(self, shape: Shape) -> dict[str, tuple[Shape, torch.dtype | None]]:
        return {MOMENTUM: (shape, None)}

    def update(
        self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, State], rate: float, _steps: int
    ) -> None:
        muon = torch.optim.Muon(
            list(parameters.values()),
            lr=rate,
            weight_decay=self._config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        for name, parameter in parameters.items():
            muon.state[parameter] = dict(states[name])
        muon.step()  # type: ignore[no-untyped-call]


RULES: dict[OptimizerName, type[AdamW | AdamW8bit | Muon]] = {"adamw": AdamW, "adamw_8bit": AdamW8bit, "muon": Muon}


def is_quantised(shape: Shape) -> bool:
    """Whether "adamw_8bit" keeps the moments of a whole parameter of this shape in 8 bits."""
    return len(shape) > 1 and math.prod(shape[1:]) % BLOCK == 0


def is_hidden_matrix(shape: Shape, *, is_outer: bool) -> bool:
    """Whether "muon" updates a parameter by Muon; `is_outer` marks parameters of embeddings and heads."""
    return len(shape) == 2 and not is_outer


def _decayed(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in parameters.values() if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _torchao() -> Any:
    """The package torchao with its optimizers; ValueError if the package is not installed."""
    try:
        importlib.import_module("torchao.optim.subclass_8bit")
        return importlib.import_module("torchao")
    except ImportError as error:
        raise ValueError(
            f"optimizer.name: value 'adamw_8bit'; allowed without the package torchao: 'adamw', 'muon' ({error})"
        ) from None
