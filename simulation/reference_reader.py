"""The reference reader: claims and shards as docs/format.md says (algorithms O and R), apart from production's reader.

It shares nothing with storage/journal/assembly.py but the decoding of a shard.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simulation.ledger import Claim, Ledger
from simulation.simulated_machine import ShardMemory
from simulation.undisturbed import Whole
from storage.journal.shard import Finish, Row
from storage.records import layout
from storage.records.records import PlanRecord, Span
from storage.stores.store import ObjectStore

NO_SEAL = 1 << 62


@dataclass(frozen=True, slots=True)
class Reference:
    """The journal of an iteration, read by a second, simple implementation.

    Attributes:
        store: every object ever written, as if retention had deleted nothing.
        claims: by unit, in epoch order.
        rows: by (incarnation, epoch, response), in written order.
    """

    plan: PlanRecord
    store: ObjectStore
    claims: Mapping[int, Sequence[Claim]]
    rows: Mapping[tuple[str, int, int], Sequence[tuple[int, Row]]]

    def lineage(self, response: int) -> list[Span]:
        """Algorithm O: every span that counts; the current holder's span reaches to its last shard."""
        spans: list[Span] = []
        owner: Claim | None = None
        for claim in self.claims.get(self._unit(response), ()):
            if claim.responses is None and owner is not None and owner.incarnation not in claim.sealed:
                continue
            if claim.responses is not None and response not in claim.responses:
                continue
            if owner is not None:
                spans.append(_span(owner, claim.sealed[owner.incarnation]))
            owner = claim
        return spans if owner is None else [*spans, _span(owner, NO_SEAL)]

    def rows_of(self, response: int, span: Span) -> list[tuple[int, Row]]:
        """Algorithm R: the rows of a span."""
        rows = self.rows.get((span.incarnation, span.epoch, response), ())
        return [(sequence, row) for sequence, row in rows if sequence <= span.last_sequence]

    def used(self, response: int, spans: Sequence[Span]) -> list[Span]:
        """The spans with rows, each up to the last shard with a row."""
        found = [(span, self.rows_of(response, span)) for span in spans]
        return [
            Span(epoch=span.epoch, incarnation=span.incarnation, last_sequence=rows[-1][0])
            for span, rows in found
            if rows
        ]

    def is_undisturbed(self, response: int, spans: Sequence[Span], whole: Whole, *, to_its_end: bool) -> bool:
        """Whether the rows of the spans, in order and without a gap, are the first (or all) tokens of the response."""
        position, scored, end = 0, 0, Finish.RUNNING
        for _, row in (found for span in spans for found in self.rows_of(response, span)):
            stop, by_policy = row.start + len(row.token_ids), scored + len(row.logprobs)
            if row.start != position or end.ends_response:
                return False
            if not np.array_equal(row.token_ids, whole.token_ids[position:stop]):
                return False
            if not np.array_equal(row.logprobs, whole.logprobs[scored:by_policy]):
                return False
            position, scored, end = stop, by_policy, row.finish
            if end is Finish.AGAIN:
                position, scored = 0, 0
        return (position == len(whole.token_ids) and end is whole.finish) or not (end.ends_response or to_its_end)

    def _unit(self, response: int) -> int:
        group = response // self.plan.num_generations
        return next(slot.slot for slot in self.plan.slots if group in slot.groups)


def _span(owner: Claim, last_sequence: int) -> Span:
    return Span(epoch=owner.epoch, incarnation=owner.incarnation, last_sequence=last_sequence)


def read_reference(ledger: Ledger, plan: PlanRecord, memory: ShardMemory) -> Reference:
    """All claims and shards of the final store."""
    claims: dict[int, list[Claim]] = defaultdict(list)
    rows: dict[tuple[str, int, int], list[tuple[int, Row]]] = defaultdict(list)
    for claim in sorted(ledger.claims, key=lambda claim: claim.epoch):
        claims[claim.unit].append(claim)
    store = ledger.written()
    for key in store.list(layout.journal(plan.iteration)):
        incarnation, name = key.split("/")[-2:]
        for row in memory.decode(key, store.get(key)):
            rows[incarnation, row.epoch, row.response].append((int(name.removesuffix(".arrow")), row))
    return Reference(plan, store, claims, rows)
