"""SlotTable: the row of the key-value cache that serves each response, and the tokens that each row holds.

The table has no tensors: it chooses the tokens that the engine computes, copies and moves. A row keeps its tokens after
its response has left, until another response needs the row. A response that comes back, as after each of its turns,
therefore has only its new tokens computed, and a group's prompt is computed once even if responses start at different
times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.sampling.engines.engine import GenerationRequest


@dataclass(frozen=True, slots=True)
class Slot:
    """The tokens of prompt + response in a row; the keys and values of every token but the last are in the cache."""

    request: GenerationRequest
    token_ids: list[int]

    @property
    def cached(self) -> int:
        return len(self.token_ids) - 1

    @property
    def generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def last_token(self) -> int:
        """The token that is fed next."""
        return self.token_ids[-1]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a new response goes.

    Attributes:
        row: the row of the response.
        slot: the response's request, and its tokens, which grow as the engine decodes.
        source: the row from which the prompt without its last token is copied; None: nothing is copied.
        reused: the number of the first tokens that need no computation, because `row` holds or gets a copy of them.
    """

    row: int
    slot: Slot
    source: int | None
    reused: int

    @property
    def request(self) -> GenerationRequest:
        return self.slot.request


class SlotTable:
    """The rows of the cache, numbered 0 to max_responses_in_flight - 1."""

    def __init__(self, max_responses_in_flight: int) -> None:
        self.slots: list[Slot | None] = [None] * max_responses_in_flight
        # What free rows hold, in the order in which they became free.
        self._kept: dict[int, Slot] = {}

    @property
    def responses(self) -> dict[int, int]:
        """The row of each response in flight."""
        return {slot.request.response: row for row, slot in enumerate(self.slots) if slot is not None}

    def place(self, requests: Sequence[GenerationRequest]) -> list[Placement]:
        """Give each request a free row: the response's old row if the row still holds the prompt, else the next one.

        There must be enough free rows.
        """
        left = {slot.request.response: row for row, slot in self._kept.items()}
        rows: dict[int, int] = {}
        for request in requests:
            own = left.get(request.response)
            if own is not None and self._kept[own].request.prompt_ids == request.prompt_ids:
                rows[request.response] = own
        rows |= self._rows_for([request for request in requests if request.response not in rows], set(rows.values()))
        return self._placed(requests, rows)

    def leave(self, row: int) -> None:
        """Free the row of a response that has ended or was aborted; the row keeps its tokens."""
        slot, self.slots[row] = self.slots[row], None
        self._kept.pop(row, None)
        if slot is not None:
            self._kept[row] = slot

    def compact(self) -> list[tuple[int, int]]:
        """Move responses into the first rows without a gap; return the pairs (from, to) that the cache must copy.

        The tokens that a target row had kept go to the response's old row, so a row may be both source and target.
        """
        live = [row for row, slot in enumerate(self.slots) if slot is not None]
        holes = [row for row, slot in enumerate(self.slots[: len(live)]) if slot is None]
        moves = list(zip([row for row in live if row >= len(live)], holes, strict=True))
        back = {target: source for source, target in moves if target in self._kept}
        for source, target in moves:
            self.slots[target], self.slots[source] = self.slots[source], None
        self._kept = {back.get(row, row): slot for row, slot in self._kept.items()}
        return moves + list(back.items())

    def held(self, row: int) -> int:
        """The number of tokens in a row of the cache."""
        slot = self.slots[row] or self._kept.get(row)
        return slot.cached if slot is not None else 0

    def forget(self) -> None:
        """Mark all free rows as empty, because the weights have changed or a computation has failed."""
        self._kept.clear()

    def _rows_for(self, requests: Sequence[GenerationRequest], taken: set[int]) -> dict[int, int]:
        """Rows for responses without an old row of their own: empty rows first, then the rows left longest ago."""
        free = [row for row, slot in enumerate(self.slots) if slot is None and row not in self._kept]
        free += [row for row in self._kept if row not in taken]
        given = free[: len(requests)]
        rows, waiting = {}, []
        # All of these rows are overwritten, so a prompt that one of them holds serves a request that wants it.
        holders = {self._kept[row].request.prompt_ids: row for row in given if row in self._kept}
        for request in requests:
            row = holders.pop(request.prompt_ids, None)
            if row is None:
                waiting.append(request)
            else:
                rows[request.response] = row
        rest = [row for row in given if row not in rows.values()]
        return rows | {request.response: row for request, row in zip(waiting, rest, strict=True)}

    def _placed(self, requests: Sequence[GenerationRequest], rows: dict[int, int]) -> list[Placement]:
        """Occupy the rows, and say where each response's first tokens come from."""
        before = {row: self._kept.pop(row) for row in rows.values() if row in self._kept}
        # Rows that hold a prompt when copying begins: those that are not given away, or go to a request with it.
        holders = {slot.request.prompt_ids: row for row, slot in self._kept.items()}
        holders |= {slot.request.prompt_ids: row for row, slot in enumerate(self.slots) if slot is not None}
        reused = {}
        for request in requests:
            row = rows[request.response]
            if row in before and before[row].request.prompt_ids == request.prompt_ids:
                holders[request.prompt_ids] = row
                reused[row] = _shared(before[row], request)
        placements = []
        for request in requests:
            row, prompt = rows[request.response], request.prompt_ids
            source = None if row in reused else holders.setdefault(prompt, row)
            slot = self.slots[row] = Slot(request, [*prompt, *request.generated_ids])
            # The first to need a prompt that no row holds computes it.
            if source in (None, row):
                placements.append(Placement(row=row, slot=slot, source=None, reused=reused.get(row, 0)))
            else:
                placements.append(Placement(row=row, slot=slot, source=source, reused=len(prompt) - 1))
        return placements


def _shared(slot: Slot, request: GenerationRequest) -> int:
    """The number of a request's first tokens that a slot with an equal prompt holds, less the request's last token."""
    length = len(request.prompt_ids)
    held, wanted = tuple(slot.token_ids[length:]), request.generated_ids
    shared = min(len(held), len(wanted))
    # Seldom, after drafts or on another way; tuples are compared much faster than their tokens one by one.
    if held[:shared] != wanted[:shared]:
        shared = next(index for index, (one, other) in enumerate(zip(held, wanted, strict=False)) if one != other)
    return min(length + shared, slot.cached, length + len(wanted) - 1)
