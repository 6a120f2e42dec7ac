"""SlotTable: which row of the key-value cache serves which response, and which prompt each row holds.

It has no tensors: it decides what is computed, copied and moved, and the engine does it. A row keeps its prompt after
its response has left, until another prompt takes the row, so that a group's prompt is computed once even when its
responses start one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.sampling.engines.engine import GenerationRequest


@dataclass(slots=True)
class Slot:
    """A response in flight. `cached` tokens of prompt + response are in the cache; `last_token` is fed next."""

    request: GenerationRequest
    cached: int
    generated: int
    last_token: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a new response goes. Its prompt is copied from row `source`, is in `row` already, or must be computed."""

    row: int
    request: GenerationRequest
    source: int | None
    computes_prompt: bool


class SlotTable:
    """The rows of the cache, numbered 0 to max_responses_in_flight - 1."""

    def __init__(self, max_responses_in_flight: int) -> None:
        self.slots: list[Slot | None] = [None] * max_responses_in_flight
        self._prompts: list[tuple[int, ...] | None] = [None] * max_responses_in_flight

    @property
    def responses(self) -> dict[int, int]:
        """The row of each response in flight."""
        return {slot.request.response: row for row, slot in enumerate(self.slots) if slot is not None}

    def place(self, requests: Sequence[GenerationRequest]) -> list[Placement]:
        """Give each request a free row; there must be enough free rows."""
        free = [row for row, slot in enumerate(self.slots) if slot is None]
        holders = self._holders()
        placements, waiting = [], []
        # Free rows that hold a wanted prompt are given out first, before another prompt overwrites them.
        for request in requests:
            row = holders.get(request.prompt_ids)
            if row is None or row not in free:
                waiting.append(request)
                continue
            free.remove(row)
            placements.append(Placement(row=row, request=request, source=None, computes_prompt=False))
        for row, request in zip(free, waiting, strict=False):
            source = holders.setdefault(request.prompt_ids, row)
            first = source == row
            placements.append(
                Placement(row=row, request=request, source=None if first else source, computes_prompt=first)
            )
        for placement in placements:
            self._occupy(placement)
        return placements

    def leave(self, row: int) -> None:
        """Free the row of a response that has ended or was aborted; the row keeps its prompt."""
        self.slots[row] = None

    def compact(self) -> list[tuple[int, int]]:
        """Move responses so that they fill the first rows; return the pairs (from, to) that the cache must copy."""
        live = [row for row, slot in enumerate(self.slots) if slot is not None]
        holes = [row for row, slot in enumerate(self.slots[: len(live)]) if slot is None]
        moves = list(zip([row for row in live if row >= len(live)], holes, strict=True))
        for source, target in moves:
            self.slots[target], self.slots[source] = self.slots[source], None
            self._prompts[target] = self._prompts[source]
        return moves

    def forget_prompts(self) -> None:
        """Mark all rows as empty, because the weights have changed."""
        self._prompts = [None] * len(self._prompts)

    def _holders(self) -> dict[tuple[int, ...], int]:
        """For each prompt, a row that holds it; a free row if there is one."""
        rows = sorted(range(len(self.slots)), key=lambda row: self.slots[row] is None)
        return {prompt: row for row in rows if (prompt := self._prompts[row]) is not None}

    def _occupy(self, placement: Placement) -> None:
        request = placement.request
        tokens = request.prompt_ids + request.generated_ids
        self.slots[placement.row] = Slot(
            request=request, cached=len(tokens) - 1, generated=len(request.generated_ids), last_token=tokens[-1]
        )
        self._prompts[placement.row] = request.prompt_ids
