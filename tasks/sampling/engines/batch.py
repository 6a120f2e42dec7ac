"""Batch: the tensors on the device that describe the responses decoded together, in row order.

They are rebuilt only when responses come or go, with one copy from the host, and keep their addresses in between.
A step that verifies drafts copies the drafts from the host first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines.keyed_noise import signed64
from tasks.sampling.engines.slot_table import Slot


@dataclass(slots=True)
class Batch:
    """The next step of n responses.

    Attributes:
        token_ids: int64 [n], the tokens to feed.
        drafts: int64 [n, DRAFTS_MAX], tokens to feed behind them in a step of several tokens per row.
        cached: int64 [n], the numbers of tokens in the cache before the fed token; -1 in rows that fill the batch up.
        positions: int64 [n], the number of generated tokens, which is the position of the next token's noise.
        keys: int64 [n], the keys of the noise.
        served: int64 [n], 1, and 0 in rows that fill the batch up.
        temperature: float32 [n], see SamplingParams.
        top_p: float32 [n], see SamplingParams.
        top_k: int64 [n], see SamplingParams.
        truncated: whether any row has a top_p or a top_k.
        greedy: whether any row has temperature 0.
    """

    token_ids: Tensor
    drafts: Tensor
    cached: Tensor
    positions: Tensor
    keys: Tensor
    served: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    truncated: bool
    greedy: bool

    def draft(self, drafts: Sequence[Sequence[int]]) -> None:
        """Put equally many drafts into each row that serves a response; one copy from the host."""
        placed = self.drafts[: len(drafts), : len(drafts[0])]
        placed.copy_(torch.tensor(drafts, dtype=torch.int64).to(placed.device))

    def spread(self, width: int) -> "Batch":
        """The batch of all tokens that a step of `width` tokens per row feeds, one row for each, in order."""
        if width == 1:
            return self
        ahead = torch.arange(width, device=self.positions.device)
        fed = torch.cat((self.token_ids.unsqueeze(1), self.drafts[:, : width - 1]), dim=1)
        names = ("keys", "temperature", "top_p", "top_k")
        wide: dict[str, Any] = {name: getattr(self, name).repeat_interleave(width) for name in names}
        positions = (self.positions.unsqueeze(1) + ahead).view(-1)
        return replace(self, token_ids=fed.view(-1), positions=positions, **wide)

    def advance(self, drawn: Tensor) -> None:
        """Accept drafts while they equal `drawn` (int64 [n * width], as `spread`); what is drawn next is fed next."""
        width = len(drawn) // len(self.token_ids)
        if width == 1:
            self.token_ids.copy_(drawn)
            self.cached += self.served
            self.positions += self.served
            return
        rows = drawn.view(-1, width)
        right = (rows[:, :-1] == self.drafts[:, : width - 1]).long().cumprod(dim=1).sum(dim=1)
        self.token_ids.copy_(rows.gather(1, right.unsqueeze(1)).squeeze(1))
        taken = (right + 1) * self.served
        self.cached += taken
        self.positions += taken

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {each.name: value for each in fields(self) if isinstance(value := getattr(self, each.name), Tensor)}

    def within(self, tensors: Mapping[str, Tensor]) -> "Batch":
        """Copy the batch into the first elements of the tensors given by name, and return the batch of the copies."""
        count = len(self.token_ids)
        placed: dict[str, Any] = {name: tensors[name][:count].copy_(one) for name, one in self.tensors().items()}
        return replace(self, **placed)


def batch_of(slots: Sequence[Slot], device: torch.device, size: int | None = None) -> Batch:
    """Build the batch of responses in row order, filled up to `size` rows; default: not filled up."""
    sampling = [slot.request.sampling for slot in slots]
    rows = [
        (slot.last_token, slot.cached, slot.generated, signed64(slot.request.noise_key), 1, params.top_k)
        for slot, params in zip(slots, sampling, strict=True)
    ]
    numbers = [(params.temperature, params.top_p) for params in sampling]
    empty = (size or len(slots)) - len(slots)
    integers = torch.tensor(rows + [(0, -1, 0, 0, 0, 0)] * empty, dtype=torch.int64)
    floats = torch.tensor(numbers + [(1.0, 1.0)] * empty, dtype=torch.float64)
    # One copy for all, the bits of a float64 in an int64.
    columns = torch.cat((integers, floats.view(torch.int64)), dim=1).T.contiguous().to(device)
    token_ids, cached, positions, keys, served, top_k, *bits = columns.unbind()
    temperature, top_p = (one.view(torch.float64).float() for one in bits)
    return Batch(
        token_ids=token_ids,
        drafts=token_ids.new_zeros(len(rows) + empty, DRAFTS_MAX),
        cached=cached,
        positions=positions,
        keys=keys,
        served=served,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        truncated=any(params.top_p < 1 or params.top_k > 0 for params in sampling),
        greedy=any(params.temperature == 0 for params in sampling),
    )
