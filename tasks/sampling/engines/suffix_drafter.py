"""SuffixDrafter: drafts what followed the same last tokens, in the response itself or in others to its prompt.

Its work per step does not depend on how much it has seen: tables find, by a hash of the last tokens, the newest place
with these tokens that has a continuation. The end of a sequence has none, so no sequence finds itself. All rows and
suffixes of a step are looked up together, in arrays on the host, where an engine's tokens arrive anyway.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
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
_BACK = np.arange(1, _LONGEST + 1)
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
        self._flying: dict[int, int] = {}
        # Sequences of no response in flight, the one left longest ago first, with their response; None: a past one.
        self._left: dict[int, int | None] = {}
        self._left_by: dict[int, int] = {}
        # By sequence, tokens that are appended and indexed when drafts are asked for next.
        self._new: dict[int, list[int]] = {}

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        """See `Drafter`. A response that comes back, as after a turn, goes on in its old sequence."""
        for request in requests:
            scope = self._scope(request.prompt_ids, request.response)
            tokens = [*request.prompt_ids, *request.generated_ids]
            sequence = self._left_by.get(request.response)
            if sequence is None or not self._begins(sequence, scope, tokens):
                sequence = self._taken(scope)
            else:
                del self._left[sequence], self._left_by[request.response]
            self._flying[request.response] = sequence
            self._new[sequence] = tokens[int(self._lengths[sequence]) :]

    def draft(self, responses: Sequence[int], most: int) -> list[Sequence[int]]:
        """See `Drafter`."""
        self._settle()
        sequences = np.array([self._flying[response] for response in responses], dtype=np.int64)
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

    def extend(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """See `Drafter`."""
        for response, new in tokens.items():
            self._new.setdefault(self._flying[response], []).extend(new)

    def leave(self, responses: Sequence[int]) -> None:
        """See `Drafter`. What the response has is kept for its siblings, until the room is needed."""
        for response in responses:
            sequence = self._flying.pop(response)
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
            self._new[sequence] = [*prompt_ids, *response][: self._length_max]
            self._left[sequence] = None

    def _scope(self, prompt_ids: tuple[int, ...], response: int) -> int:
        """Sequences of one scope draft for each other; equal scopes of different prompts only cost wrong drafts."""
        return hash(prompt_ids) if self._siblings else hash((response, prompt_ids))

    def _begins(self, sequence: int, scope: int, tokens: Sequence[int]) -> bool:
        """Whether a sequence is the beginning of these tokens."""
        if sequence in self._new:
            self._settle()
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
            self._new.pop(sequence, None)
            if response is not None:
                del self._left_by[response]
        self._lengths[sequence], self._scopes[sequence] = 0, scope
        return sequence

    def _settle(self) -> None:
        """Append and index what has come, in one pass."""
        if not self._new:
            return
        sequences = np.array(list(self._new), dtype=np.int64)
        counts = np.array([len(each) for each in self._new.values()])
        owners = np.repeat(sequences, counts)
        offsets = np.arange(len(owners)) - np.repeat(counts.cumsum() - counts, counts)
        positions = self._lengths[owners] + offsets
        places = owners * self._length_max + positions
        self._tokens[places] = list(chain.from_iterable(self._new.values()))
        self._lengths[sequences] += counts
        self._new = {}
        buckets = self._buckets(self._before(places), self._scopes[owners])
        for index, suffix in enumerate(_SUFFIXES):
            whole = positions >= suffix
            self._places[index, buckets[whole, index]] = places[whole]

    def _found(self, sequences: Integers) -> Integers:
        """Per sequence the place of a continuation of its longest suffix that has one; -1: none."""
        lengths, scopes = self._lengths[sequences], self._scopes[sequences]
        last = self._before(sequences * self._length_max + lengths)
        buckets = self._buckets(last, scopes)
        places = self._places[np.arange(len(_SUFFIXES)), buckets]
        owners, positions = places // self._length_max, places % self._length_max
        fits = (self._scopes[owners] == scopes[:, None]) & (positions < self._lengths[owners])
        fits &= (positions >= _SUFFIXES) & (lengths[:, None] >= _SUFFIXES)
        # Hashes may be equal by accident, and a sequence may have been emptied since.
        differs = self._before(places) != last[:, None, :]
        fits &= ~(differs & (_SUFFIXES[:, None] >= _BACK)).any(axis=2)
        best = fits.argmax(axis=1)
        rows = np.arange(len(sequences))
        found: Integers = np.where(fits[rows, best], places[rows, best], -1)
        return found

    def _before(self, places: Integers) -> NDArray[np.int32]:
        """The _LONGEST tokens before each place, the nearest first; senseless beyond a sequence's beginning."""
        before: NDArray[np.int32] = self._tokens[np.maximum(places[..., None] - _BACK, 0)]
        return before

    def _buckets(self, before: NDArray[np.int32], scopes: Integers) -> Integers:
        """By the tokens before n places (int32 [n, _LONGEST]), a bucket for each suffix: int64 [n, len(_SUFFIXES)]."""
        sums = (before.astype(np.int64) * _POWERS).cumsum(axis=1)[:, _SUFFIXES - 1]
        words = (sums ^ scopes[:, None]) * _ODD
        found: Integers = (words ^ (words >> 32)) & (self._places.shape[1] - 1)
        return found
