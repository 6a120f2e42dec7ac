"""KeyValueCache: keys and values of the responses in flight, one row per response, allocated in advance.

It knows rows, positions and layers, but no requests. A cache position is the index of a token in prompt + response. The
capacity grows in steps, so that memory follows the longest response, not the context length. Attention is told by a
mask which positions count, on every device and in every dtype; packed_cache.py needs none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor

from tasks.sampling.engines.prefill_passes import Piece, padded_passes
from tasks.sampling.engines.window import Window

SPAN_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class MaskedWindow:
    """A `Window` of n rows with T new tokens each.

    Attributes:
        cache: the cache.
        rows: int64 [n], the cache rows; None for the first n rows, which are then read without a copy.
        count: n.
        positions: int64 [n, T], the cache positions of the new tokens.
        owners: int64 [n, 1], the cache row of each row, also if `rows` is None.
        span: the number of cache positions attended to, from 0.
        mask: [n, 1, T, span] in the model's dtype, 0 where a token may attend and -inf elsewhere.
        cells: by number of heads, the cells to which new keys are written, int64 [n * T * heads]; set by the cache.
        shared_masks: by number of query heads that share a key head, the mask of their rows.
    """

    cache: "KeyValueCache"
    rows: Tensor | None
    count: int
    positions: Tensor
    owners: Tensor
    span: int
    mask: Tensor
    cells: dict[int, Tensor] = field(default_factory=dict)
    shared_masks: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `Window`; N is n * T."""
        (tokens, heads, size), kv_heads = queries.shape, keys.shape[1]
        count, length, shared = self.count, tokens // self.count, heads // kv_heads
        # The query heads that share a key head are computed as further rows of its attention product.
        rows = queries.reshape(count, -1, kv_heads, shared, size)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, size)
        new_keys, new_values = (new.reshape(count, length, kv_heads, size) for new in (keys, values))
        seen_keys, seen_values = self.cache.write(layer, self, new_keys, new_values)
        attended = F.scaled_dot_product_attention(rows, seen_keys, seen_values, attn_mask=self._shared_mask(shared))
        attended = attended.view(count, kv_heads, -1, length, size).permute(0, 3, 1, 2, 4)
        return attended.reshape(tokens, heads * size)

    def _shared_mask(self, shared: int) -> Tensor:
        if self.mask.shape[2] == 1:
            return self.mask
        found = self.shared_masks.get(shared)
        if found is None:
            found = self.shared_masks[shared] = self.mask.repeat(1, 1, shared, 1)
        return found


class KeyValueCache:
    """Per layer a tensor of keys and one of values, [rows, heads, capacity, size], created at the layer's first use."""

    def __init__(self, *, rows: int, context_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = rows
        self._limit = _rounded_up(context_length)
        self._last_position = context_length - 1
        self._dtype = dtype
        self._device = device
        self._capacity = min(4 * SPAN_MULTIPLE, self._limit)
        self._row_range = torch.arange(rows, device=device)
        self._span_range = torch.arange(self._limit, device=device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def capacity(self) -> int:
        """The number of cache positions allocated per row."""
        return self._capacity

    def window(self, first: Tensor, length: int, reach: int, rows: Tensor | None = None) -> MaskedWindow:
        """The window of `length` new tokens per row, the first of which have the positions `first` (int64 [n]).

        `reach`, the largest position + 1, comes from the caller: reading `first` would make the host wait for the
        device. Padding beyond the context is written to the last position, which no prefix reaches.
        """
        count = first.shape[0]
        span = min(_rounded_up(reach), self._limit)
        self.reserve(span)
        positions = first.unsqueeze(1)
        if length > 1:
            positions = (positions + self._span_range[:length]).clamp_(max=self._last_position)
        owners = (self._row_range[:count] if rows is None else rows).unsqueeze(1)
        mask = torch.zeros(count, 1, length, span, dtype=self._dtype, device=self._device)
        mask.masked_fill_((self._span_range[:span] > positions.unsqueeze(2)).unsqueeze(1), -torch.inf)
        return MaskedWindow(
            cache=self, rows=rows, count=count, positions=positions, owners=owners, span=span, mask=mask
        )

    def step_window(self, cached: Tensor, reach: int, width: int = 1) -> Window:
        """See `TokenCache`."""
        return self.window(cached, width, reach)

    def prefill_windows(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[Piece], Tensor, Window]]:
        """See `TokenCache`; token ids are [n, T], padded with 0."""
        for passed, length in padded_passes(pieces):
            token_ids = torch.tensor([[*piece.token_ids, *[0] * (length - len(piece.token_ids))] for piece in passed])
            rows = torch.tensor([piece.row for piece in passed], device=self._device)
            first = torch.tensor([piece.first for piece in passed], device=self._device)
            reach = max(piece.first for piece in passed) + length
            yield passed, token_ids.to(self._device), self.window(first, length, reach, rows)

    def reserve(self, span: int) -> None:
        """See `TokenCache`."""
        if span <= self._capacity:
            return
        capacity = min(max(span, 2 * self._capacity), self._limit)
        for layer, pair in self._layers.items():
            keys, values = (torch.nn.functional.pad(old, (0, 0, 0, capacity - self._capacity)) for old in pair)
            self._layers[layer] = (keys, values)
        self._capacity = capacity

    def write(self, layer: int, window: MaskedWindow, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [n, T, heads, size] of new tokens; return all in the window, [n, heads, span, size]."""
        stored = self._layers.get(layer)
        if stored is None:
            stored = self._layers[layer] = (self._empty(keys), self._empty(values))
        return self._put(stored[0], window, keys), self._put(stored[1], window, values)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source row onto its target row; all are read before any write."""
        if not sources or not length:
            return
        source = torch.tensor(sources, device=self._device)
        target = torch.tensor(targets, device=self._device)
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]

    def _put(self, stored: Tensor, window: MaskedWindow, new: Tensor) -> Tensor:
        heads, size = new.shape[-2:]
        stored.view(-1, size).index_copy_(0, self._cells(window, heads), new.reshape(-1, size))
        return (
            stored[: window.count, :, : window.span] if window.rows is None else stored[window.rows, :, : window.span]
        )

    def _cells(self, window: MaskedWindow, heads: int) -> Tensor:
        cells = window.cells.get(heads)
        if cells is None:
            lanes = window.owners.unsqueeze(2) * heads + torch.arange(heads, device=self._device)  # [n, 1, heads]
            cells = window.cells[heads] = (lanes * self._capacity + window.positions.unsqueeze(2)).reshape(-1)
        return cells

    def _empty(self, new: Tensor) -> Tensor:
        heads, size = new.shape[-2:]
        # Zeros, because masked positions are multiplied by weight 0, which would keep a NaN.
        return torch.zeros(self._rows, heads, self._capacity, size, dtype=new.dtype, device=self._device)


def _rounded_up(length: int) -> int:
    return -(-length // SPAN_MULTIPLE) * SPAN_MULTIPLE
