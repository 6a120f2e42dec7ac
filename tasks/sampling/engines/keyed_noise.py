"""Keyed noise: sampling noise as a pure function of (key, position, token id), and the choice of tokens with it.

Noise depends neither on the process nor on the batch that decodes a response, so a response continues after a move as
without the move. Models and requests are unknown here. The function, in 64-bit integers that wrap around, with `mix64`
of tasks/sampling/engines/engine.py and G = 0x9E3779B97F4A7C15, is:

    row  = mix64(key + (position + 1) * G)            output number `position` of a SplitMix64 seeded with `key`
    word = mix64(row + (token + 1) * G)               output number `token` of a SplitMix64 seeded with `row`
    v    = min((word >> 1) * 2^-63 + 2^-64, 1 - 2^-24)                                     uniform in (0, 1), float32
    E    = -log1p(-v)                                                                      exponential with mean 1
    g    = -log(E)                                                                         standard Gumbel

The sampled token maximises log softmax(logits / temperature) + g. The winning token has a small `v`, and float32 holds
small numbers to 24 bits, so a vocabulary of 150,000 tokens loses no resolution.

This module is written in torch, for every device; on a GPU, keyed_noise_triton.py computes the function in two kernels
where Triton is at hand.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_LAST_SHIFT = 31
# Elements per pass. On a CPU, a block and its scratch stay in the second-level cache (measured: 3x faster than whole
# tensors at a vocabulary of 32,000). On an accelerator the limit only bounds the scratch memory.
_BLOCK_CPU = 1 << 15
_BLOCK_ACCELERATOR = 1 << 25
# Elements that are sorted at once for top-p and top-k: sorting takes about 60 bytes for each.
_SORTED_AT_ONCE = 1 << 22
_V_MAX = 1.0 - 2.0**-24


def signed64(key: int) -> int:
    """Convert an unsigned 64-bit key to the int64 with the same bits, the form in which tensors hold keys."""
    return key - (1 << 64) if key >= 1 << 63 else key


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token id at one position of each row.

    Args:
        keys: int64 [B], the bits of each response's noise key.
        positions: int64 [B], the index of the token to be sampled, counted from the prompt's end.
        vocab_size: V.

    Returns:
        float32 [B, V] on the device of `keys`, every value finite, in [-2.82, 44.4].
    """
    offsets = _token_offsets(vocab_size, keys.device)
    rows = _mix(keys + (positions + 1) * _GAMMA).unsqueeze(1)
    noise = torch.empty(rows.shape[0], vocab_size, dtype=torch.float32, device=keys.device)
    block = _BLOCK_CPU if keys.device.type == "cpu" else _BLOCK_ACCELERATOR
    height, width = max(1, block // vocab_size), min(block, vocab_size)
    for top in range(0, rows.shape[0], height):
        for left in range(0, vocab_size, width):
            words = _mix(rows[top : top + height] + offsets[left : left + width])
            noise[top : top + height, left : left + width] = _gumbel_of_words(words)
    return noise


def sample(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    *,
    truncated: bool | None = None,
    greedy: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row with keyed noise.

    Top-k keeps the k most probable tokens. Top-p then renormalises these and keeps the smallest set of most probable
    tokens whose probabilities sum to at least top_p. Ties in probability go to the smaller token id.

    Args:
        logits: [B, V], any floating dtype.
        keys: int64 [B], see `gumbel`.
        positions: int64 [B], see `gumbel`.
        temperature: float32 [B]; 0 takes the most probable token.
        top_p: float32 [B] in (0, 1]; 1 is off.
        top_k: int64 [B]; 0 is off.
        truncated: whether any row has top_p or top_k on. None finds out, which waits for an accelerator. False lets a
            GPU draw with keyed_noise_triton.py; the first such call compiles the kernels, checks them and waits.
        greedy: whether any row has temperature 0. None finds out.

    Returns:
        Token ids int64 [B], and their log-probs float32 [B]: natural log, under softmax(logits / temperature) over the
        whole vocabulary (temperature 0: softmax(logits)), whatever top_p and top_k cut away.
    """
    if truncated is False and logits.is_cuda:
        fused = _fused_draw(logits.device, logits.dtype)
        if fused is not None:
            token_ids, logprobs, _ = fused(logits, keys, positions, temperature)
            return token_ids, logprobs
    if truncated is None:
        truncated = bool(((top_p < 1.0) | (top_k > 0)).any())
    if greedy is None:
        greedy = bool((temperature == 0).any())
    logits = logits.float()
    divisor = torch.where(temperature == 0, 1.0, temperature) if greedy else temperature
    logprobs = torch.log_softmax(logits / divisor.unsqueeze(1), dim=-1)
    scores = gumbel(keys, positions, logits.shape[1]).add_(logprobs)
    if truncated:
        height = max(1, _SORTED_AT_ONCE // logits.shape[1])
        for rows in map(slice, range(0, len(logits), height), range(height, len(logits) + height, height)):
            scores[rows].masked_fill_(~_support(logprobs[rows], top_p[rows], top_k[rows]), -torch.inf)
    if greedy:
        scores = torch.where((temperature == 0).unsqueeze(1), logits, scores)
    token_ids = scores.argmax(dim=-1)
    return token_ids, logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)


@lru_cache(maxsize=32)
def _fused_draw(
    device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None:
    """`keyed_noise_triton.draw`, or None if Triton is missing or its results differ from those of this module."""
    try:
        from tasks.sampling.engines.keyed_noise_triton import checked_draw  # noqa: PLC0415 - Triton exists beside GPUs only
    except ImportError:
        return None
    return checked_draw(gumbel, device, dtype)


def _support(logprobs: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """The tokens that top-k and then top-p keep: bool [B, V]."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[1], device=logprobs.device)
    k = torch.where(top_k > 0, top_k, logprobs.shape[1]).unsqueeze(1)
    probs = ordered.double().exp().masked_fill(rank >= k, 0.0)
    before = probs.cumsum(dim=-1) - probs
    # top_p 1 is off, however the sum is rounded.
    p = torch.where(top_p >= 1.0, torch.inf, top_p.double()).unsqueeze(1)
    kept = (before < p * probs.sum(dim=-1, keepdim=True)) & (rank < k)
    return torch.zeros_like(kept).scatter(1, order, kept)


@lru_cache(maxsize=8)
def _token_offsets(vocab_size: int, device: torch.device) -> Tensor:
    # An ordinary tensor even if the first caller is in inference mode, because later callers may not be.
    with torch.inference_mode(mode=False):
        return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _GAMMA


def _mix(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place on int64."""
    scratch = torch.empty_like(words)
    for shift, multiplier in _MULTIPLIERS:
        words.bitwise_xor_(_shift_right(words, shift, scratch)).mul_(multiplier)
    return words.bitwise_xor_(_shift_right(words, _LAST_SHIFT, scratch))


def _shift_right(words: Tensor, shift: int, out: Tensor) -> Tensor:
    """Shift logically; int64's own shift is arithmetic."""
    return torch.bitwise_right_shift(words, shift, out=out).bitwise_and_((1 << (64 - shift)) - 1)


def _gumbel_of_words(words: Tensor) -> Tensor:
    """Convert 64-bit words to standard Gumbel noise in float32; the words are overwritten."""
    upper = _shift_right(words, 1, words).to(torch.float32)
    v = upper.mul_(2.0**-63).add_(2.0**-64).clamp_(max=_V_MAX)
    return v.neg_().log1p_().neg_().log_().neg_()
