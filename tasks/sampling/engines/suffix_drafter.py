"""SuffixDrafter: drafts what followed the same last tokens, in the response itself or in others to its prompt.

Its work per step does not depend on how much it has seen: tables find, by a hash of the last tokens, the newest place
with these tokens that has a continuation. The end of a sequence has none, so no sequence finds itself. All rows and
suffixes of a step are looked up together, in arrays on the host, where an engine's tokens arrive anyway. Tokens enter
the tables only when a response to their prompt is asked for: while a full batch decodes without drafts, few do.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.sampling.engines.engine import GenerationRequest

Integers = NDArray[np.int64]

# Tokens of the suffixes that are looked for; the longest that is found counts.
_SUFFIXES = np.array([8, 6, 4, 3, 2])
_LONGEST = int(_SUFFIXES[0])
# Places per suffix: as many as tokens, within bounds; a newer place takes an older one's bucket.
_BUCKETS_MIN, _BUCKETS_MAX = 1 << 14, 1 << 21
# At most so many sequences, and so many tokens in all, at 4 bytes, if that holds two sequences per row of the engine.
_SEQUENCES_MAX, _TOKENS_MAX = 1 << 12, 1 << 24
_TABLES = np.arange(len(_SUFFIXES))
_BACK = np.arange(1, _LONGEST + 1)
# Which of the tokens before a place count for a suffix.
_COUNTS = (_BACK[:, None] <= _SUFFIXES)[:, :, None]
_POWERS = np.cumprod(np.full(_LONGEST, 0x5851F42D4C957F2D, dtype=np.int64))
_ODD = np.int64(0x9E3779B97F4A7C15 - (1 << 64))


class SuffixDrafter:
    """A `Drafter`. Responses to equal prompts are siblings, in whatever iteration they were generated."""

    def __init__(self, *, rows: int, context_length: int, siblings: bool = True) -> None:
        """Make a drafter that has seen nothing; memory is taken as sequences come.

        Args:
            rows: the most responses in flight.
            context_length: the most tokens of prompt + response.
            siblings: whether a response is drafted from others to its prompt, too, and not from itself alone.
        """
        count = max(2 * rows, min(_SEQUENCES_MAX, _TOKENS_MAX // context_length))
        self._siblings = siblings
        self._length_max = context_length
        # A place is sequence * context_length + position.
        self._tokens = np.zeros(count * context_length, dtype=np.int32)
        self._lengths = np.zeros(count, dtype=np.int64)
        self._scopes = np.zeros(count, dtype=np.int64)
        buckets = min(max(_BUCKETS_MIN, 1 << (len(self._tokens) - 1).bit_length()), _BUCKETS_MAX)
        kind = np.int32 if len(self._tokens) < 1 << 31 else np.int64
        # Written at once: the first use of each page would slow the first steps down.
        self._places: NDArray[Any] = np.full((len(_SUFFIXES), buckets), 0, dtype=kind)
        self._empty = list(range(count))[::-1]
        # By response in flight its sequence, and its tokens, to which the engine appends.
        self._flying: dict[int, tuple[int, Sequence[int]]] = {}
        # Sequences of no response in flight, the one left longest ago first, with their response; None: a past one.
        self._left: dict[int, int | None] = {}
        self._left_by: dict[int, int] = {}
        # By scope the sequences that may have tokens outside the tables, with the tokens of those in flight.
        self._open: dict[int, dict[int, Sequence[int]]] = {}
        self._indexed = np.zeros(count, dtype=np.int64)

    def start(self, requests: Sequence[GenerationRequest], tokens: Sequence[Sequence[int]]) -> None:
        """See `Drafter`. A response that comes back, as after a turn, goes on in its old sequence."""
        for request, so_far in zip(requests, tokens, strict=True):
            scope = self._scope(request.prompt_ids, request.response)
            sequence = self._left_by.get(request.response)
            if sequence is None or not self._begins(sequence, scope, so_far):
                sequence = self._taken(scope)
            else:
                del self._left[sequence], self._left_by[request.response]
            self._flying[request.response] = sequence, so_far
            self._open.setdefault(scope, {})[sequence] = so_far

    def draft(self, responses: Sequence[int], most: int) -> list[Sequence[int]]:
        """See `Drafter`."""
        sequences = np.array([self._flying[response][0] for response in responses], dtype=np.int64)
        self._settle(dict.fromkeys(self._scopes[sequences].tolist()))
        found = self._found(sequences)
        owners = found // self._length_max
        held = np.where(found < 0, 0, self._lengths[owners] - found % self._length_max)
        ahead = np.arange(most)
        # What a response repeats of itself is thought to go on for ever, and ends with the response so far.
        own = (owners == sequences) & (found >= 0)
        steps = np.where(own[:, None], ahead % np.maximum(held, 1)[:, None], ahead)
        tokens = self._tokens[np.clip(found[:, None] + steps, 0, len(self._tokens) - 1)].tolist()
        counts = np.where(own, most, held).tolist()
        return [row[:count] for row, count in zip(tokens, counts, strict=True)]

    def leave(self, responses: Sequence[int]) -> None:
        """See `Drafter`. What the response has is kept for its siblings, until the room is needed."""
        for response in responses:
            sequence, tokens = self._flying.pop(response)
            self._store(sequence, tokens)
            self._open.setdefault(int(self._scopes[sequence]), {})[sequence] = ()
            before = self._left_by.get(response)
            if before is not None:
                self._left[before] = None
            self._left[sequence] = response
            self._left_by[response] = sequence

    def remember(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """See `Remembers`. Of equal suffixes the last response's is found first."""
        if not self._siblings:
            return
        scope = self._scope(tuple(prompt_ids), 0)
        for response in responses:
            sequence = self._taken(scope)
            self._store(sequence, [*prompt_ids, *response][: self._length_max])
            self._open.setdefault(scope, {})[sequence] = ()
            self._left[sequence] = None

    def _scope(self, prompt_ids: tuple[int, ...], response: int) -> int:
        """Sequences of one scope draft for each other; equal scopes of different prompts only cost wrong drafts."""
        return hash(prompt_ids) if self._siblings else hash((response, prompt_ids))

    def _begins(self, sequence: int, scope: int, tokens: Sequence[int]) -> bool:
        """Whether a sequence is the beginning of these tokens."""
        first, length = sequence * self._length_max, int(self._lengths[sequence])
        held = self._tokens[first : first + length]
        return bool(self._scopes[sequence] == scope and np.array_equal(held, tokens[:length]))

    def _taken(self, scope: int) -> int:
        """An empty sequence, or the one left longest ago, emptied."""
        if self._empty:
            sequence = self._empty.pop()
        else:
            sequence = next(iter(self._left))
            response = self._left.pop(sequence)
            before = int(self._scopes[sequence])
            waiting = self._open.get(before, {})
            waiting.pop(sequence, None)
            if not waiting:
                self._open.pop(before, None)
            if response is not None:
                del self._left_by[response]
        self._lengths[sequence], self._indexed[sequence], self._scopes[sequence] = 0, 0, scope
        return sequence

    def _store(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append what a sequence has not yet of a response's tokens."""
        length = int(self._lengths[sequence])
        if len(tokens) > length:
            first = sequence * self._length_max
            self._tokens[first + length : first + len(tokens)] = tokens[length:]
            self._lengths[sequence] = len(tokens)

    def _settle(self, scopes: Iterable[int]) -> None:
        """Index what has come in these scopes, in one pass."""
        found: list[int] = []
        for scope in scopes:
            flying = {}
            for sequence, tokens in self._open.pop(scope, {}).items():
                found.append(sequence)
                if tokens:
                    self._store(sequence, tokens)
                    flying[sequence] = tokens
            if flying:
                self._open[scope] = flying
        sequences = np.array(found, dtype=np.int64)
        counts = self._lengths[sequences] - self._indexed[sequences]
        owners = np.repeat(sequences, counts)
        offsets = np.arange(len(owners)) - np.repeat(counts.cumsum() - counts, counts)
        positions = self._indexed[owners] + offsets
        self._indexed[sequences] = self._lengths[sequences]
        places = owners * self._length_max + positions
        buckets = self._buckets(self._before(places), self._scopes[owners])
        for index, suffix in enumerate(_SUFFIXES):
            whole = positions >= suffix
            self._places[index, buckets[index, whole]] = places[whole]

    def _found(self, sequences: Integers) -> Integers:
        """Per sequence the place of a continuation of its longest suffix that has one; -1: none."""
        lengths, scopes = self._lengths[sequences], self._scopes[sequences]
        last = self._before(sequences * self._length_max + lengths)
        buckets = self._buckets(last, scopes)
        places = self._places[_TABLES[:, None], buckets]
        owners, positions = places // self._length_max, places % self._length_max
        fits = (self._scopes[owners] == scopes) & (positions < self._lengths[owners])
        fits &= (positions >= _SUFFIXES[:, None]) & (lengths >= _SUFFIXES[:, None])
        # Hashes may be equal by accident, and a sequence may have been emptied since.
        differs = self._before(places) != last[:, None, :]
        fits &= ~(differs & _COUNTS).any(axis=0)
        best, rows = fits.argmax(axis=0), np.arange(len(sequences))
        found: Integers = np.where(fits[best, rows], places[best, rows], -1)
        return found

    def _before(self, places: Integers) -> NDArray[np.int32]:
        """The _LONGEST tokens before each place, the nearest first; senseless beyond a sequence's beginning.

        int32 [_LONGEST, *places.shape]: NumPy is fast along long rows.
        """
        back = places - _BACK.reshape(-1, *[1] * places.ndim)
        before: NDArray[np.int32] = self._tokens[np.maximum(back, 0, out=back)]
        return before

    def _buckets(self, before: NDArray[np.int32], scopes: Integers) -> Integers:
        """By the tokens before n places (int32 [_LONGEST, n]), a bucket for each suffix: int64 [len(_SUFFIXES), n]."""
        sums = (before * _POWERS[:, None]).cumsum(axis=0)[_SUFFIXES - 1]
        words = (sums ^ scopes) * _ODD
        words ^= words >> 32
        words &= self._places.shape[1] - 1
        found: Integers = words
        return found
