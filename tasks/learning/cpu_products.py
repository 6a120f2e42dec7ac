"""Matrix products on a CPU: by oneDNN where oneDNN is faster than torch.mm, otherwise by torch.mm.

On processors that are not Intel's, MKL uses its AVX2 code, whereas oneDNN uses AVX-512 wherever it exists. Both compute
in float32 and differ in rounding only. The choice depends on the processor and on shapes, never on time, so a step
repeats bit by bit.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - torch's own custom

from tasks.sampling.engines.kernels import bound_compiled_products

# Below this, a product takes less time than oneDNN's dispatch.
FLOPS_MIN = 1 << 21


@functools.cache
def _onednn_linear() -> Any:
    """The linear operator of oneDNN, or None if the processor or torch lacks it."""
    bound_compiled_products()
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def suits_onednn(tensor: Tensor) -> bool:
    """Whether oneDNN computes large products of a tensor: float32, on a CPU with AVX-512."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and _onednn_linear() is not None


def times_transposed(left: Tensor, right: Tensor) -> Tensor:
    """The product left @ right.T of [N, K] and [M, K] of one dtype, [N, M], without gradient."""
    if 2 * left.numel() * len(right) < FLOPS_MIN or not suits_onednn(left):
        return left @ right.T
    product: Tensor = _onednn_linear()(left, right, None, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        outputs: Tensor = _onednn_linear()(inputs, weight, bias, "none", [], "")
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        grad = grad_outputs.reshape(-1, grad_outputs.shape[-1])
        grad_inputs = times_transposed(grad, weight.T).view(inputs.shape) if of_inputs else None
        grad_weight = _outer(grad, inputs.reshape(-1, inputs.shape[-1])) if of_weight else None
        return grad_inputs, grad_weight, grad.sum(dim=0) if of_bias else None


def _outer(grad: Tensor, inputs: Tensor) -> Tensor:
    """The product grad.T @ inputs, from [N, M] and [N, K] to [M, K]."""
    # oneDNN copies its left operand when that is a transpose, so the smaller one is put there.
    if inputs.shape[1] <= grad.shape[1]:
        return times_transposed(inputs.T, grad.T).T
    return times_transposed(grad.T, inputs.T)


class CpuLinear(nn.Linear):
    """An nn.Linear that oneDNN computes where `suits_onednn` holds."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        """Map [..., K] to [..., M]."""
        small = 2 * input.numel() * self.out_features < FLOPS_MIN
        if small or not suits_onednn(input):
            return F.linear(input, self.weight, self.bias)
        outputs: Tensor = _Linear.apply(input.contiguous(), self.weight, self.bias)  # type: ignore[no-untyped-call]
        return outputs


def use_cpu_products(module: nn.Module) -> None:
    """Turn the plain linear layers of a module on a CPU into `CpuLinear`, in place; names and parameters stay."""
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu":
            layer.__class__ = CpuLinear
