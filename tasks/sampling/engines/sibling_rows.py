"""SiblingRows: which rows on the device hold responses to an equal prompt; the books, on the host, without tokens.

They change when a request comes and when an earlier response is taken in, and never in a step.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NO_SCOPE = 0
# Tokens of the suffixes by which a row is looked up; the longest that is found wins.
SHORTEST, LONGEST = 2, 8


def scope_of(prompt_ids: Sequence[int]) -> int:
    """The scope of responses to a prompt, a signed 64-bit integer; equal scopes of two prompts cost wrong drafts."""
    return hash(tuple(prompt_ids)) or 1


class SiblingRows:
    """The rows of `slots` responses in flight, numbered from 0, and behind them a ring of earlier responses' rows.

    Rows of one scope draft for each other. The row of a response that has ended counts until its slot is needed.
    """

    def __init__(self, slots: int, ring: int, width: int) -> None:
        """Make books without a row.

        Args:
            slots: the most responses in flight.
            ring: the rows of the ring; the one written longest ago is overwritten next.
            width: the most rows in which a response is looked up.
        """
        self.candidates: NDArray[np.int32] = np.full((slots, width), -1, dtype=np.int32)
        self.is_changed = True  # since the reader last set this to False
        self._slots = slots
        self._scopes = [NO_SCOPE] * (slots + ring)
        # By scope, its rows in flight and in the ring, the newest last.
        self._rows: dict[int, dict[int, None]] = defaultdict(dict)
        self._next = 0

    def occupy(self, slot: int, scope: int) -> int | None:
        """A request takes a slot; returns the ring's row, from 0, to which the old tokens belong, or None for none."""
        old = self._scopes[slot]
        self._leave(slot)
        saved = None if old == NO_SCOPE else self.remember(old)
        self._join(slot, scope)
        return saved

    def remember(self, scope: int) -> int:
        """The ring's row, from 0, for an earlier response of a scope."""
        row = self._next
        self._next = (row + 1) % (len(self._scopes) - self._slots)
        self._leave(self._slots + row)
        self._join(self._slots + row, scope)
        return row

    def _join(self, row: int, scope: int) -> None:
        self._scopes[row] = scope
        if scope != NO_SCOPE:
            self._rows[scope][row] = None
            self._write(scope)

    def _leave(self, row: int) -> None:
        scope, self._scopes[row] = self._scopes[row], NO_SCOPE
        if row < self._slots:
            self.candidates[row] = -1
        if scope != NO_SCOPE:
            del self._rows[scope][row]
            self._write(scope)
            if not self._rows[scope]:
                del self._rows[scope]

    def _write(self, scope: int) -> None:
        """Renew the candidates of a scope's slots: other rows, the newest first, and the own one."""
        rows = list(self._rows[scope])
        slots = [row for row in rows if row < self._slots]
        width = self.candidates.shape[1]
        for slot in slots:
            others = [row for row in reversed(rows) if row != slot][: width - 1]
            self.candidates[slot] = [*others, slot, *[-1] * (width - 1 - len(others))]
        self.is_changed = True
