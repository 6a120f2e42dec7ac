"""How the tokens of new responses are divided into forward passes. It has no tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

# Tokens of one pass, and with padding also those of one row: they bound the memory of activations and of the mask.
TOKENS_MAX = 8192
_LENGTH_MAX = 512


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a response.

    Attributes:
        row: the response's row of the cache.
        first: the position of the first token.
        token_ids: the tokens.
    """

    row: int
    first: int
    token_ids: tuple[int, ...]

    def after(self, count: int) -> "Piece":
        """What is left after the first `count` tokens."""
        return replace(self, first=self.first + count, token_ids=self.token_ids[count:])

    def until(self, count: int) -> "Piece":
        """The first `count` tokens."""
        return replace(self, token_ids=self.token_ids[:count])


def padded_passes(pieces: Sequence[Piece]) -> Iterator[tuple[list[Piece], int]]:
    """Passes of pieces that are padded to a length: similar lengths in one pass, long pieces in several."""
    waiting = [piece for piece in pieces if piece.token_ids]
    while waiting:
        waiting.sort(key=lambda piece: len(piece.token_ids))
        length = min(len(waiting[-1].token_ids), _LENGTH_MAX)
        similar = [piece for piece in waiting if 2 * len(piece.token_ids) >= length]
        passed = similar[-max(1, TOKENS_MAX // length) :]
        del waiting[-len(passed) :]
        yield [piece.until(length) for piece in passed], length
        waiting += [piece.after(length) for piece in passed if len(piece.token_ids) > length]


def packed_passes(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Cut the pieces into passes of TOKENS_MAX tokens, in which pieces follow each other; the last may be smaller."""
    passed: list[Piece] = []
    room = TOKENS_MAX
    for piece in pieces:
        rest = piece
        while rest.token_ids:
            passed.append(rest.until(room))
            rest = rest.after(room)
            room -= len(passed[-1].token_ids)
            if not room:
                yield passed
                passed, room = [], TOKENS_MAX
    if passed:
        yield passed
