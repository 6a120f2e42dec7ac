"""Batch: the tensors on the device that describe the responses decoded together, in row order.

They are rebuilt only when responses come or go. In between, the sampled tokens are fed without a copy from the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.sampling.engines.keyed_noise import signed64
from tasks.sampling.engines.slot_table import Slot


@dataclass(slots=True)
class Batch:
    """Tensors [n]: the tokens to feed, how many tokens are cached before them, and how the next one is drawn."""

    token_ids: Tensor
    cached: Tensor
    positions: Tensor
    keys: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    truncated: bool
    greedy: bool

    def advance(self, token_ids: Tensor) -> None:
        """Make `token_ids`, which have just been drawn, the next tokens to feed."""
        self.token_ids = token_ids
        self.cached += 1
        self.positions += 1


def batch_of(slots: Sequence[Slot], device: torch.device) -> Batch:
    """Build the batch of responses in row order."""
    sampling = [slot.request.sampling for slot in slots]
    integers = torch.tensor(
        [
            (
                slot.last_token,
                slot.cached,
                slot.generated,
                signed64(slot.request.noise_key),
                slot.request.sampling.top_k,
            )
            for slot in slots
        ],
        dtype=torch.int64,
    ).to(device)
    floats = torch.tensor([(params.temperature, params.top_p) for params in sampling], dtype=torch.float32).to(device)
    token_ids, cached, positions, keys, top_k = (column.contiguous() for column in integers.unbind(1))
    temperature, top_p = (column.contiguous() for column in floats.unbind(1))
    return Batch(
        token_ids=token_ids,
        cached=cached,
        positions=positions,
        keys=keys,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        truncated=any(params.top_p < 1 or params.top_k > 0 for params in sampling),
        greedy=any(params.temperature == 0 for params in sampling),
    )
