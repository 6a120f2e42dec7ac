"""What a decoder and the engine see of a key-value cache: a window for each forward pass.

kv_cache.py implements both for every device, and packed_cache.py for kernels that read as much of a row as it holds.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from tasks.sampling.engines.prefill_passes import Piece


class Window(Protocol):
    """The cache positions that one forward pass of N new tokens reads and writes, in the decoder's order of tokens."""

    @property
    def positions(self) -> Tensor:
        """The cache positions of the new tokens, N int64 in any shape."""
        ...

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Store keys and values [N, kv_heads, size] of a layer, and attend to them and to those before in their rows.

        Queries are [N, heads, size]; returns [N, heads * size].
        """
        ...


class TokenCache(Protocol):
    """Keys and values of the responses in flight, one row per response."""

    @property
    def capacity(self) -> int:
        """The number of cache positions allocated per row."""
        ...

    def reserve(self, span: int) -> None:
        """Allocate at least `span` positions per row; held tokens stay, at a new address if the capacity grows."""
        ...

    def step_window(self, cached: Tensor, reach: int, width: int = 1) -> Window:
        """`width` new tokens for each of the first n rows, after `cached` tokens (int64 [n]).

        `reach`, the largest position + 1, comes from the caller: reading `cached` would make the host wait for the
        device. Positions beyond the context, of drafts that no response can use, spoil no position within it.
        """
        ...

    def prefill_windows(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[Piece], Tensor, Window]]:
        """Divide pieces into passes: the pieces of each, their token ids as a decoder takes them, and the window."""
        ...

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of each source row onto its target row; all are read before any write."""
        ...
