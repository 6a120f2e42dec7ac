"""PackedCache: keys and values of the responses in flight, read without masks; the device knows how long each row is.

A row of the cache is one page of a kernel's page table, so a kernel reads what a row holds and no more. The new tokens
of several rows lie one after another, without padding. A step's window depends on nothing that only the host knows, but
the capacity; so a recorded step stays valid until the capacity grows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.sampling.engines.prefill_passes import Piece, packed_passes
from tasks.sampling.engines.row_attention import PAGE_MULTIPLE, RowAttention, RowReads
from tasks.sampling.engines.window import Window

_PAGE = 2 * PAGE_MULTIPLE  # the capacity at first


@dataclass(frozen=True, slots=True)
class PackedWindow:
    """A `Window`.

    Attributes:
        cache: the cache.
        positions: int64 [N].
        cells: int64 [N], where keys are written, as row * capacity + position.
        reads: what attention reads.
    """

    cache: "PackedCache"
    positions: Tensor
    cells: Tensor
    reads: RowReads

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `Window`."""
        return self.cache.attend(layer, self, queries, keys, values).reshape(len(queries), -1)


class PackedCache:
    """Per layer a tensor of keys and one of values, [rows, capacity, heads, size], created at the layer's first use."""

    def __init__(
        self,
        *,
        rows: int,
        context_length: int,
        dtype: torch.dtype,
        device: torch.device,
        attention: RowAttention,
        ahead: int = 0,
    ) -> None:
        """Make a cache; `ahead` is the most tokens that a step feeds behind the last token of a row."""
        self._rows = rows
        self._limit = _rounded_up(context_length + ahead)
        self._last_position = context_length - 1
        self._dtype = dtype
        self._device = device
        self._attention = attention
        self._capacity = min(_PAGE, self._limit)
        self._row_range = torch.arange(rows, device=device)
        self._tables = torch.arange(rows, dtype=torch.int32, device=device).unsqueeze(1)
        self._bounds = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def capacity(self) -> int:
        """The number of cache positions allocated per row."""
        return self._capacity

    def reserve(self, span: int) -> None:
        """See `TokenCache`. One further position is kept for `step_window`; no response ever reaches it."""
        if span < self._capacity:
            return
        capacity = min(max(_rounded_up(span + 1), 2 * self._capacity), self._limit)
        for layer, pair in self._layers.items():
            keys, values = (torch.nn.functional.pad(old, (0, 0, 0, 0, 0, capacity - self._capacity)) for old in pair)
            self._layers[layer] = (keys, values)
        self._capacity = capacity

    def step_window(self, cached: Tensor, reach: int, width: int = 1) -> Window:
        """See `TokenCache`. A row of which `cached` is -1 serves no response: what it holds stays as it is."""
        self.reserve(reach)
        count = len(cached)
        if width > 1:
            return self._wide_window(cached, width)
        # -1 counts from the end of the row.
        cells = self._row_range[:count] * self._capacity + cached.remainder(self._capacity)
        reads = RowReads(
            bounds=self._bounds[: count + 1],
            rows=self._tables[:count],
            lengths=(cached + 1).clamp_(min=1).int(),
            longest=1,
        )
        return PackedWindow(cache=self, positions=cached.clamp(min=0), cells=cells, reads=reads)

    def _wide_window(self, cached: Tensor, width: int) -> Window:
        """A step's window of several tokens per row, one row after the other."""
        count, first = len(cached), cached.unsqueeze(1)
        positions = first + torch.arange(width, device=self._device)
        # A row without a response writes all of its tokens to the one position that is kept for that.
        held = torch.where(first < 0, self._capacity - 1, positions)
        cells = self._row_range[:count].unsqueeze(1) * self._capacity + held
        reads = RowReads(
            bounds=self._bounds[: count + 1] * width,
            rows=self._tables[:count],
            lengths=(cached + width).clamp_(min=width).int(),
            longest=width,
        )
        positions = positions.clamp_(min=0, max=self._last_position)
        return PackedWindow(cache=self, positions=positions.view(-1), cells=cells.view(-1), reads=reads)

    def prefill_windows(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[Piece], Tensor, Window]]:
        """See `TokenCache`; token ids are [1, N]."""
        for passed in packed_passes(pieces):
            self.reserve(max(piece.first + len(piece.token_ids) for piece in passed))
            lengths = [len(piece.token_ids) for piece in passed]
            positions = [piece.first + index for piece in passed for index in range(len(piece.token_ids))]
            token_ids = [token for piece in passed for token in piece.token_ids]
            owners = [piece.row for piece in passed for _ in piece.token_ids]
            # One transfer for the tokens and one for the pieces.
            tokens = torch.tensor([token_ids, positions, owners]).to(self._device)
            bounds = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
            rows, ends = [piece.row for piece in passed], [piece.first + len(piece.token_ids) for piece in passed]
            sizes = torch.tensor([*bounds, *rows, *ends], dtype=torch.int32).to(self._device)
            count = len(passed)
            reads = RowReads(
                bounds=sizes[: count + 1],
                # A copy of its own, because kernels read it as a table.
                rows=sizes[count + 1 : 2 * count + 1].clone().unsqueeze(1),
                lengths=sizes[2 * count + 1 :].clone(),
                longest=max(lengths),
            )
            cells = tokens[2] * self._capacity + tokens[1]
            yield passed, tokens[:1], PackedWindow(cache=self, positions=tokens[1], cells=cells, reads=reads)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source row onto its target row; all are read before any write."""
        if not sources or not length:
            return
        source, target = torch.tensor([sources, targets]).to(self._device)
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :length] = tensor[source, :length]

    def attend(self, layer: int, window: PackedWindow, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values [N, kv_heads, size]; return what the queries [N, heads, size] attend to, alike."""
        stored = self._layers.get(layer)
        if stored is None:
            stored = self._layers[layer] = (self._empty(keys), self._empty(values))
        for tensor, new in zip(stored, (keys, values), strict=True):
            tensor.view(-1, *tensor.shape[2:]).index_copy_(0, window.cells, new)
        return self._attention(queries, *stored, window.reads)

    def _empty(self, new: Tensor) -> Tensor:
        # Zeros, because a row that serves no response is read as well, and its result must be a number.
        return torch.zeros(self._rows, self._capacity, *new.shape[1:], dtype=new.dtype, device=self._device)


def _rounded_up(length: int) -> int:
    return -(-length // PAGE_MULTIPLE) * PAGE_MULTIPLE
