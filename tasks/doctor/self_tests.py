"""Self-tests of a device: tokens drawn with keyed noise, and a step of attention with its gradient.

References are computed in Python and in float64 on the CPU, without a kernel of the device.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own custom

from storage.journal.noise_keys import mix64
from storage.records.fitness import Finding
from tasks.sampling.engines.keyed_noise import sample, signed64

_GAMMA, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_ROWS, _VOCABULARY = 8, 500
_HEADS, _WIDTH, _SPAN = 4, 64, 96
# The largest differences that rounding explains: of log-probs in float32, and of attention by dtype.
_LOGPROB_DIFFERENCE_MAX = 1e-4
_ATTENTION_DIFFERENCE_MAX = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
Draw = Callable[..., tuple[Tensor, Tensor]]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def noise_finding(device: torch.device, draw: Draw = sample) -> Finding:
    """A finding that is right if `draw` (keyed_noise.sample) on a device draws the tokens of keyed_noise's formula."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(_ROWS, _VOCABULARY, generator=generator)
    keys = [mix64(row + 1) for row in range(_ROWS)]
    positions = [17 * row for row in range(_ROWS)]
    token_ids, logprobs = draw(
        logits.to(device),
        torch.tensor([signed64(key) for key in keys], device=device),
        torch.tensor(positions, device=device),
        torch.ones(_ROWS, device=device),
        torch.ones(_ROWS, device=device),
        torch.zeros(_ROWS, dtype=torch.int64, device=device),
        truncated=False,
        greedy=False,
    )
    expected = torch.log_softmax(logits.double(), dim=-1)
    noise = torch.tensor([_gumbel_row(key, at) for key, at in zip(keys, positions, strict=True)], dtype=torch.float64)
    drawn = (expected + noise).argmax(dim=-1)
    same = int((token_ids.cpu() == drawn).sum())
    difference = (logprobs.cpu().double() - expected.gather(1, drawn.unsqueeze(1)).squeeze(1)).abs().max().item()
    shown = f"{same} of {_ROWS} tokens are the reference's, log-probs differ by up to {difference:.1e}"
    is_right = same == _ROWS and difference <= _LOGPROB_DIFFERENCE_MAX
    return Finding(f"keyed noise on {device.type}", shown, None if is_right else shown)


def attention_finding(
    device: torch.device, attend: Attend = F.scaled_dot_product_attention, dtype: torch.dtype | None = None
) -> Finding:
    """A finding that is right if a step of attention and its gradient on the device equal float64 on the CPU.

    dtype: dtype on the device; None: bfloat16 on a GPU and float32 on a CPU.
    """
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, _HEADS, 1, _WIDTH), (2, _HEADS, _SPAN, _WIDTH), (2, _HEADS, _SPAN, _WIDTH)]
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    here = [tensor.to(device, copy=True).requires_grad_() for tensor in given]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    found = attend(*here)
    query, key, value = exact
    expected = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(_WIDTH), dim=-1) @ value
    found.float().square().sum().backward()  # type: ignore[no-untyped-call]
    expected.square().sum().backward()  # type: ignore[no-untyped-call]
    pairs = [(found, expected), *((mine.grad, theirs.grad) for mine, theirs in zip(here, exact, strict=True))]
    differences = [(mine.detach().cpu().double() - theirs.detach()).abs().max() for mine, theirs in pairs]  # type: ignore[union-attr]
    difference = torch.stack(differences).max().item()
    shown = f"{str(dtype).removeprefix('torch.')}, result and gradient differ from float64 by up to {difference:.1e}"
    is_right = difference <= _ATTENTION_DIFFERENCE_MAX[dtype]  # False for NaN, too
    return Finding(f"attention on {device.type}", shown, None if is_right else shown)


def _gumbel_row(key: int, position: int) -> list[float]:
    """The noise of every token at one position, by the formula at the head of keyed_noise, in Python's numbers."""
    row = mix64((key + (position + 1) * _GAMMA) & _MASK)
    words = (mix64((row + (token + 1) * _GAMMA) & _MASK) for token in range(_VOCABULARY))
    uniform = (min((word >> 1) * 2.0**-63 + 2.0**-64, 1 - 2.0**-24) for word in words)
    return [-math.log(-math.log1p(-value)) for value in uniform]
