"""The choice of tokens with keyed noise as a fused GPU kernel; keyed_noise.py makes some 25 passes to do the same.

The logits are read once. One program per row and block of the vocabulary computes the block's maximum, its sum of
exponentials and its best token; one program per row combines the blocks. Noise is made in registers and never stored.
This module is imported only where logits are on a GPU, and has no top-p and top-k.

The 64-bit words are the same as in keyed_noise.py. The noise differs only in the last bits of its logarithms, which
every library rounds in its own way, and scores are added up in another order. If the two best scores of a row differ by
less than about 1e-5, either may win here, as between any two devices.
"""

import logging
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

Gumbel = Callable[[Tensor, Tensor, int], Tensor]
"""`keyed_noise.gumbel`: (keys [B], positions [B], vocabulary size V) -> noise float32 [B, V]."""
Draw = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""The type of `draw`."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LOG = logging.getLogger(__name__)
# 8 elements per thread, because a 64-bit word needs two registers.
_BLOCK, _WARPS = 2048, 8
_TOLERANCE = 3e-5

# The constants of keyed_noise.py, unsigned. A kernel sees globals only as constexpr.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
_V_SCALE = tl.constexpr(2.0**-63)
_V_OFFSET = tl.constexpr(2.0**-64)
_V_MAX = tl.constexpr(1.0 - 2.0**-24)
_IMPOSSIBLE = tl.constexpr(float("-inf"))


def checked_draw(gumbel: Gumbel, device: torch.device, dtype: torch.dtype) -> Draw | None:
    """Return `draw` if it gives the same results on this device and dtype as separate passes with `gumbel`.

    It compares both on small random cases, which compiles the kernels and waits for the device. Returns None for a
    dtype that is not in `DTYPES`, and, with a warning, if the results differ or Triton cannot compile.
    """
    if dtype not in DTYPES:
        return None
    try:
        difference = _difference(gumbel, device, dtype)
    except Exception as error:  # noqa: BLE001 - Triton, compilers and drivers raise any type; the passes always work
        _LOG.warning("no fused sampling of %s on %s, which costs time only: Triton failed: %s", dtype, device, error)
        return None
    if difference is not None:
        _LOG.warning("no fused sampling of %s on %s, which costs time only: %s", dtype, device, difference)
        return None
    return draw


def draw(logits: Tensor, keys: Tensor, positions: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row from the whole vocabulary with keyed noise. Does not wait for the device; no gradients.

    If scores are equal, the smaller token id wins, as in torch.argmax. A row with a NaN or +inf, or with nothing above
    -inf, is no distribution: the row gets token id 0 and log-prob NaN.

    Args:
        logits: [B, V] in one of `DTYPES`, B and V at least 1.
        keys: int64 [B], see `keyed_noise.gumbel`.
        positions: int64 [B], see `keyed_noise.gumbel`.
        temperature: float32 [B]; 0 takes the most probable token.

    Returns:
        Token ids int64 [B]; their log-probs float32 [B], natural log, under softmax(logits / temperature) (temperature
        0: softmax(logits)); and their scores float32 [B]: log-prob plus noise (temperature 0: the logit).
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    temperature = temperature.contiguous()
    rows, vocab_size = logits.shape
    blocks = triton.cdiv(vocab_size, _BLOCK)
    # One allocation each: views into one allocation are aligned differently, and Triton compiles anew for each pattern.
    maxima, sums, bests = (torch.empty(rows, blocks, dtype=torch.float32, device=logits.device) for _ in range(3))
    best_ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs, scores = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    # Triton launches on the current device, whatever the tensors' own is.
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        _reduce_blocks[(rows, blocks)](
            logits,
            keys.contiguous(),
            positions.contiguous(),
            temperature,
            maxima,
            sums,
            bests,
            best_ids,
            vocab_size,
            logits.stride(0),
            block=_BLOCK,
            num_warps=_WARPS,
        )
        _combine_blocks[(rows,)](
            logits,
            temperature,
            maxima,
            sums,
            bests,
            best_ids,
            token_ids,
            logprobs,
            scores,
            blocks,
            logits.stride(0),
            width=triton.next_power_of_2(blocks),
        )
    return token_ids, logprobs, scores


@triton.jit
def _reduce_blocks(
    logits: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    temperature: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    bests: tl.tensor,
    best_ids: tl.tensor,
    vocab_size: int,
    row_stride: int,
    block: tl.constexpr,
) -> None:
    """For one row and block: maximum, sum of exp(x - maximum), best score and its token id; x = logit / temperature.

    A score is relative to the block's maximum, x - maximum + noise, to keep the resolution of small numbers. In a row
    with temperature 0 it is the logit. Tensors are pointers to their first element.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    token_ids = part * block + tl.arange(0, block)
    heat = tl.load(temperature + row)
    greedy = heat == 0.0
    # In 64 bits, because a row can begin beyond 2^31 elements.
    start = logits + row.to(tl.int64) * row_stride
    x = tl.load(start + token_ids, mask=token_ids < vocab_size, other=_IMPOSSIBLE).to(tl.float32)
    x = tl.div_rn(x, tl.where(greedy, 1.0, heat))
    maximum = tl.max(x, axis=0)
    x_relative = x - tl.where(maximum == _IMPOSSIBLE, 0.0, maximum)

    key = tl.load(keys + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    word = _mix(key + (position + 1) * _GAMMA)
    words = _mix(word + (token_ids.to(tl.uint64) + 1) * _GAMMA)
    # Elements beyond the vocabulary are -inf and come last in the block, so they never win: ties go to the left.
    score = tl.where(greedy, x, x_relative + _gumbel_of_words(words))
    best, best_index = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)

    cell = row.to(tl.int64) * tl.num_programs(1) + part
    tl.store(maxima + cell, maximum)
    tl.store(sums + cell, tl.sum(tl.exp(x_relative), axis=0))
    tl.store(bests + cell, best)
    tl.store(best_ids + cell, part * block + best_index)


@triton.jit
def _combine_blocks(
    logits: tl.tensor,
    temperature: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    bests: tl.tensor,
    best_ids: tl.tensor,
    token_ids: tl.tensor,
    logprobs: tl.tensor,
    scores: tl.tensor,
    blocks: int,
    row_stride: int,
    width: tl.constexpr,
) -> None:
    """Combine the blocks of one row into the best token and the token's log-prob and score.

    `width` is a power of 2 not below `blocks`.
    """
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, width)
    inside = parts < blocks
    cells = row * blocks + parts
    heat = tl.load(temperature + row)
    greedy = heat == 0.0

    block_maxima = tl.load(maxima + cells, mask=inside, other=_IMPOSSIBLE)
    maximum = tl.max(block_maxima, axis=0)
    maximum = tl.where(maximum == _IMPOSSIBLE, 0.0, maximum)
    behind = block_maxima - maximum
    total = tl.sum(tl.load(sums + cells, mask=inside, other=0.0) * tl.exp(behind), axis=0)
    score = tl.load(bests + cells, mask=inside, other=_IMPOSSIBLE)
    score = tl.where(greedy, score, score + behind)
    best, best_part = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)

    # A NaN makes comparisons useless, and the winner's id could lie beyond the vocabulary.
    best_part = tl.where(total == total, best_part, 0)  # noqa: PLR0124 - false for NaN only
    token_id = tl.where(total == total, tl.load(best_ids + row * blocks + best_part), 0)  # noqa: PLR0124 - likewise
    x = tl.div_rn(tl.load(logits + row * row_stride + token_id).to(tl.float32), tl.where(greedy, 1.0, heat))
    log_total = tl.log(total)
    tl.store(token_ids + row, token_id.to(tl.int64))
    tl.store(logprobs + row, (x - maximum) - log_total)
    tl.store(scores + row, tl.where(greedy, best, best - log_total))


@triton.jit
def _mix(words: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser on uint64, whose products wrap and whose shifts bring in zeros."""
    words = (words ^ (words >> 30)) * _MULTIPLIER_1
    words = (words ^ (words >> 27)) * _MULTIPLIER_2
    return words ^ (words >> 31)


@triton.jit
def _gumbel_of_words(words: tl.tensor) -> tl.tensor:
    """Convert uint64 words to standard Gumbel noise in float32.

    Triton's interpreter has no log1p. With u = fl(1 - v) and c = v - (1 - u), both exact, -log1p(-v) = -log(u - c) =
    c / u - log(u) up to terms in c^2, and c / u = c + c * v within the last bit. The relative error is 1.3e-7 with the
    log of CUDA's libdevice, and below 2.8e-7 with any log that errs by at most a unit in the last place.
    """
    v = tl.minimum((words >> 1).to(tl.float32) * _V_SCALE + _V_OFFSET, _V_MAX)
    u = 1.0 - v
    c = v - (1.0 - u)
    return -tl.log((c + c * v) - tl.log(u))


def _difference(gumbel: Gumbel, device: torch.device, dtype: torch.dtype) -> str | None:
    """How the results of `draw` on this device differ from those of separate passes, as text; None if they agree.

    The case with a vocabulary of 1 compares the noise itself. The one with 96 has greedy rows, and the last one ends
    within a block.
    """
    generator = torch.Generator().manual_seed(1)
    rows = 64
    for vocab_size, temperature in ((1, 1.0), (96, 0.6), (3 * _BLOCK + 17, 1.0)):
        # Made on the CPU, so that every device compares the same numbers.
        logits = (4 * torch.randn(rows, vocab_size, generator=generator)).to(device, dtype)
        keys = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator).to(device) * 2 + 1
        positions = torch.arange(rows, device=device)
        heat = torch.full((rows,), temperature, device=device)
        if vocab_size == 96:
            heat[::2] = 0.0
        greedy = heat == 0
        whole = torch.log_softmax(logits.float() / torch.where(greedy, 1.0, heat).unsqueeze(1), dim=-1)
        wanted = torch.where(greedy.unsqueeze(1), logits.float(), whole + gumbel(keys, positions, vocab_size))
        token_ids, logprobs, scores = draw(logits, keys, positions, heat)
        if not bool(((token_ids >= 0) & (token_ids < vocab_size)).all()):
            return f"token ids outside of a vocabulary of {vocab_size}"
        at = token_ids.unsqueeze(1)
        for name, found, expected in (
            ("the best token's score", wanted.gather(1, at).squeeze(1), wanted.amax(dim=-1)),
            ("log-probs", logprobs, whole.gather(1, at).squeeze(1)),
            ("noise", scores, wanted.amax(dim=-1)),
        ):
            error = float((found - expected).abs().max())
            if not error <= _TOLERANCE:
                return f"{name} differs by {error:.2g} at a vocabulary of {vocab_size}"
    return None
