"""The lives of the crew's incarnations: the time of each life, and the fate of the decoded tokens.

Claims and journal say which tokens count; heartbeats give the times, and the tokens decoded and lost.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from storage.journal.assembly import JournalReader
from storage.journal.liveness import read_heartbeat
from storage.journal.shard import Finish
from storage.records import layout
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import JOINED_POOL, TRAIN_POOL, GradedResponse, PlanRecord, SlotLife, Span
from storage.stores.store import ObjectStore

log = logging.getLogger(__name__)


class JournalTally:
    """Tokens in the journal by incarnation, added up part by part while a part's rows are in memory.

    Only tokens that the policy sampled are counted. kept: those that the batches name. unused: those of unused
    responses. recovered: those that a response already had when the incarnation first extended it, of the incarnations
    in `silent` only. stopped: the incarnations that hold an unused response without an end.
    """

    def __init__(
        self,
        reader: JournalReader,
        graded: Iterable[GradedResponse],
        unused: Collection[int],
        announced: Iterable[HeartbeatRecord],
    ) -> None:
        self.reader = reader
        # Made claims, and has no heartbeat that can be read.
        self.silent = set(reader.book.incarnations) - {alive.incarnation for alive in announced}
        self.kept: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()
        self.recovered: Counter[str] = Counter()
        self.stopped: set[str] = set()
        self._lineages = {response.response: response.lineage for response in graded}
        self._unused = unused

    def add(self, part: range) -> None:
        """Count the rows of a part, which the reader holds now."""
        book = self.reader.book
        for response in part:
            self.kept += self._sampled(response, self._lineages.get(response, ()))
            if not self.silent and response not in self._unused:
                continue
            assembled, owner = self.reader.assemble(response), book.owner(response)
            for number, span in enumerate(assembled.lineage):
                if span.incarnation in self.silent:
                    before = self._sampled(response, assembled.lineage[:number])
                    self.recovered[span.incarnation] += before.total()
            if response in self._unused:
                self.unused += self._sampled(response, assembled.lineage)
            if response in self._unused and owner is not None and not assembled.finish.ends_response:
                self.stopped.add(owner.incarnation)

    def _sampled(self, response: int, lineage: Iterable[Span]) -> Counter[str]:
        """The tokens that a response has from each incarnation, since it last began again."""
        found: Counter[str] = Counter()
        for span in lineage:
            for at, row in self.reader.shards.rows(span.incarnation, span.epoch, response):
                if at <= span.last_sequence and row.finish is Finish.AGAIN:
                    found.clear()
                elif at <= span.last_sequence:
                    found[span.incarnation] += len(row.logprobs)
        return found


def read_heartbeats(store: ObjectStore, plan: PlanRecord) -> list[HeartbeatRecord]:
    """The last heartbeat of every incarnation, where there is one that can be read and names a pool with a price."""
    found = (read_heartbeat(store, key) for key in store.list(layout.alive_all(plan.iteration)))
    pools = {JOINED_POOL, TRAIN_POOL, *(place.pool for place in plan.slots)}
    return [record for record in found if record is not None and record.pool in pools]


def unannounced(
    plan: PlanRecord, announced: Sequence[HeartbeatRecord], tally: JournalTally, until_s: float
) -> list[HeartbeatRecord]:
    """For each silent incarnation of the tally a heartbeat that claims and journal allow.

    When it lived is not known. It counts as paid for since the plan, until the last heartbeat of the others (without
    any, until `until_s`), so its cost is an upper bound.
    """
    if not tally.silent:
        return []
    log.warning(
        "iteration %d: %s made claims, and no heartbeat can be read; what they cost is estimated",
        plan.iteration,
        ", ".join(sorted(tally.silent)),
    )
    reader = tally.reader
    pools = {place.slot: place.pool for place in plan.slots}
    ended_at_s = max((alive.updated_at_s for alive in announced), default=until_s)
    estimated = []
    for incarnation in sorted(tally.silent):
        slot, held = reader.book.incarnations[incarnation], reader.book.held_by(incarnation)
        estimated.append(
            HeartbeatRecord(
                incarnation=incarnation,
                slot=slot,
                state="gone" if held and held <= reader.shards.ended else "working",
                beat=0,
                pool=pools.get(slot, JOINED_POOL),
                host="",
                pid=0,
                started_at_s=min(plan.created_at_s, ended_at_s),
                updated_at_s=ended_at_s,
                tokens_generated=reader.shards.tokens(incarnation),
                tokens_recovered=tally.recovered[incarnation],
                prefill_tokens=0,
                responses_finished=len(held & reader.shards.ended),
                engine="",
                batch_invariant=False,
            )
        )
    return estimated


def slot_lives(announced: Sequence[HeartbeatRecord], tally: JournalTally) -> list[SlotLife]:
    """Return the lives of incarnations that announced themselves, by slot and start.

    tokens_regenerated: the decoded tokens of the last heartbeat, without counted and unused tokens. Such tokens
    were unflushed at a kill, or void because another member had claimed the response.
    """
    journalled, lives = tally.reader.shards, []
    for alive in announced:
        incarnation = alive.incarnation
        decoded = max(alive.tokens_generated, journalled.tokens(incarnation))
        tokens_unused = tally.unused[incarnation]
        if incarnation in tally.stopped and alive.state == "gone":
            # What it was decoding when the iteration closed is dropped, and no member decodes it again.
            tokens_unused += decoded - journalled.tokens(incarnation)
        lives.append(
            SlotLife(
                slot=alive.slot,
                incarnation=incarnation,
                pool=alive.pool,
                started_at_s=alive.started_at_s,
                ended_at_s=alive.updated_at_s,
                state="lost" if alive.state != "gone" else "left" if alive.unfinished else "gone",
                tokens_kept=tally.kept[incarnation],
                tokens_recovered=alive.tokens_recovered,
                tokens_regenerated=decoded - tally.kept[incarnation] - tokens_unused,
                prefill_tokens=alive.prefill_tokens,
                usd_per_hour=alive.usd_per_hour,
                tokens_unused=tokens_unused,
                working_at_s=alive.working_at_s,
                decode_s=alive.decode_s,
                puts=alive.puts,
                gets=alive.gets,
                bytes_read=alive.bytes_read,
                drafts=alive.drafts,
            ),
        )
    return sorted(lives, key=lambda life: (life.slot, life.started_at_s))
