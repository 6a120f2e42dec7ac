"""The row of a packed pass: the places of the responses' tokens, and the keys that each token attends to.

Responses to one prompt share the prompt: all prompt tokens but the last are computed once, and their keys and values
are repeated for the attention of each response. The last token of a prompt is each response's own, because the hidden
state there predicts the response's first token.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - torch's own custom


class Repeats(NamedTuple):
    """Which keys and values of a row of N tokens the M places for keys get; R tokens occur more than once.

    Attributes:
        tokens: [M] int64, the row's token at each place.
        first: [N] int64, the first place of each token.
        again: [R] int64, the tokens that occur more than once.
        further: [C, R] int64, the further places of each token in `again`, filled up with 0.
        is_further: [C, R] bool, False where `further` is filled up.
    """

    tokens: Tensor
    first: Tensor
    again: Tensor
    further: Tensor
    is_further: Tensor


@dataclass(frozen=True)
class PackedRow:
    """The tokens of B responses in a row of N, as S sequences: shared prompts, and responses without what they share.

    Attributes:
        places: [N] int64, where each token is in the flattened input ids of a `TokenBatch`.
        positions: [N] int64, the position of each token in its response.
        origins: [B] int64, where each response would begin in the row if its shared tokens lay directly before its own;
            may be negative.
        query_bounds: [S + 1] int32, where each sequence begins in the row, and N.
        key_bounds: [S + 1] int32, where the keys of each sequence begin, and M.
        queries_max: The tokens of the longest sequence.
        keys_max: The most keys of a sequence.
        repeats: Which keys are repeated; None if no prompt is shared, and keys lie as queries do.
    """

    places: Tensor
    positions: Tensor
    origins: Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    queries_max: int
    keys_max: int
    repeats: Repeats | None

    def to(self, device: torch.device) -> "PackedRow":
        """The row on `device`. A copy from the CPU to a GPU runs in the background; Python does not wait."""
        repeats = (
            None if self.repeats is None else Repeats(*(each.to(device, non_blocking=True) for each in self.repeats))
        )
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("places", "positions", "origins", "query_bounds", "key_bounds")
        }
        return PackedRow(**moved, queries_max=self.queries_max, keys_max=self.keys_max, repeats=repeats)


class _Sequence(NamedTuple):
    """Tokens of a response that lie together; they attend to the tokens before `start`, too.

    Attributes:
        row: The response's row in the batch.
        start: The position of the first token.
        end: The position after the last token.
        begin: Where the tokens begin in the packed row.
        keys: Where their keys begin.
        prompt: Where the shared prompt begins in the packed row.
    """

    row: int
    start: int
    end: int
    begin: int
    keys: int
    prompt: int

    @property
    def own(self) -> range:
        """The tokens in the packed row."""
        return range(self.begin, self.begin + self.end - self.start)


def same_prompts(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """For each prompt, the index of the first prompt with equal tokens."""
    seen: dict[tuple[int, ...], int] = {}
    return tuple(seen.setdefault(tuple(prompt), index) for index, prompt in enumerate(prompts))


def repeated_tokens(prompt_lengths: Sequence[int], same: Sequence[int]) -> int:
    """The number of prompt tokens that a packed pass leaves out, because an earlier response shares the prompt."""
    return sum(prompt_lengths[row] - 1 for row, first in enumerate(same) if first != row)


def packed_row(total_lengths: Sequence[int], prompt_lengths: Sequence[int], same: Sequence[int]) -> PackedRow:
    """The row of a pass, on the CPU.

    Args:
        total_lengths: The tokens of each of B responses, prompt included.
        prompt_lengths: The tokens of their prompts.
        same: The result of `same_prompts` for the responses' prompts.
    """
    sequences = _sequences(total_lengths, prompt_lengths, same)
    width, last = max(total_lengths), sequences[-1]
    own = {each.row: each.begin - each.start for each in sequences}
    return PackedRow(
        places=_ranges(range(each.row * width + each.start, each.row * width + each.end) for each in sequences),
        positions=_ranges(range(each.start, each.end) for each in sequences),
        origins=torch.tensor([own[row] for row in range(len(total_lengths))]),
        query_bounds=torch.tensor([*(each.begin for each in sequences), last.own.stop], dtype=torch.int32),
        key_bounds=torch.tensor([*(each.keys for each in sequences), last.keys + last.end], dtype=torch.int32),
        queries_max=max(len(each.own) for each in sequences),
        keys_max=max(each.end for each in sequences),
        repeats=_repeats(sequences) if any(each.start for each in sequences) else None,
    )


def _sequences(total_lengths: Sequence[int], prompt_lengths: Sequence[int], same: Sequence[int]) -> list[_Sequence]:
    """The sequences of a row: a shared prompt once, without the last token, and then the prompt's responses."""
    found: list[_Sequence] = []
    prompts: dict[int, int] = {}
    users = Counter(same)
    begin = keys = 0
    for row, (length, prompt_length) in enumerate(zip(total_lengths, prompt_lengths, strict=True)):
        tokens = prompt_length - 1 if users[same[row]] > 1 else 0
        parts = [(tokens, length)]
        if tokens and same[row] == row:
            prompts[row] = begin
            parts.insert(0, (0, tokens))
        for start, end in parts:
            found.append(_Sequence(row, start, end, begin, keys, prompts.get(same[row], 0)))
            begin, keys = begin + end - start, keys + end
    return found


def _ranges(ranges: Iterable[range]) -> Tensor:
    return torch.cat([torch.arange(each.start, each.stop) for each in ranges])


def _repeats(sequences: Sequence[_Sequence]) -> Repeats:
    users: dict[int, list[_Sequence]] = {}
    for each in sequences:
        if each.start:
            users.setdefault(each.prompt, []).append(each)
    most = max(map(len, users.values()))
    further, is_further = [], []
    for those in users.values():
        starts = torch.tensor([each.keys for each in those])
        grid = torch.arange(those[0].start) + starts[:, None]
        further.append(F.pad(grid, (0, 0, 0, most - len(those))))
        is_further.append(F.pad(torch.ones_like(grid, dtype=torch.bool), (0, 0, 0, most - len(those))))
    before = [(range(each.prompt, each.prompt + each.start), each.own) for each in sequences]
    return Repeats(
        tokens=_ranges(part for parts in before for part in parts),
        first=_ranges(range(each.keys + each.start, each.keys + each.end) for each in sequences),
        again=_ranges(range(prompt, prompt + those[0].start) for prompt, those in users.items()),
        further=torch.cat(further, dim=1),
        is_further=torch.cat(is_further, dim=1),
    )


def repeated(values: Tensor, repeats: Repeats) -> Tensor:
    """Keys or values [1, heads, N, D] at their M places: [1, heads, M, D].

    The gradients of a token's places are added in float32 and always in the same order: the gradient of `index_select`
    is added in the values' dtype, and on a GPU in any order.
    """
    found: Tensor = _Repeated.apply(values, repeats)  # type: ignore[no-untyped-call]
    return found


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, repeats: Repeats) -> Tensor:
        ctx.repeats = repeats
        return values.index_select(2, repeats.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        repeats: Repeats = ctx.repeats
        found = grad.index_select(2, repeats.first)
        # A place of each token at a time: together they may be far more than the gradient, where groups are unlike.
        total = found.index_select(2, repeats.again).to(torch.promote_types(grad.dtype, torch.float32))
        for places, is_one in zip(repeats.further, repeats.is_further, strict=True):
            total += grad.index_select(2, places).masked_fill_(~is_one[:, None], 0)
        return found.index_copy_(2, repeats.again, total.to(grad.dtype)), None
