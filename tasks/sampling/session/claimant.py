"""Claimant: claims responses for one incarnation, and tells which responses are still held (docs/format.md section 5).

tasks/crew_model/rebalance.py decides which responses to take; the claimant reads the facts for the decision and writes
the claims. No engine is known here. One thread at a time uses a claimant.
"""

import logging
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from storage.clock import Clock
from storage.journal.assembly import JournalReader
from storage.journal.claims import AskRecord, Asks, take_over
from storage.journal.journal import PARALLEL_READS
from storage.journal.liveness import Liveness, MemberSign
from storage.records import layout
from storage.records.records import TRAIN_POOL, PlanRecord
from storage.records.run import exists
from storage.stores.store import ObjectStore
from tasks.crew_model.rebalance import Candidate, Cause, Holder, Transfer, choose, looked_at
from tasks.sampling.session.actions import ClaimedResponse, Seen, Taken
from tasks.sampling.session.candidates import candidates_of
from tasks.sampling.session.finished_siblings import FinishedSiblings

log = logging.getLogger(__name__)

# A holder answers an ask with its next flush. One that has not answered by so many looks is not waited for.
LOOKS_TO_ANSWER = 2
# How much of others' journals one call reads. With PARALLEL_READS it takes six round trips.
SHARDS_A_CALL = 32


@dataclass(slots=True)
class _OpenAsk:
    """An ask that a holder has not answered.

    Attributes:
        responses: the responses for which the holder was asked.
        looks: the number of looks since then.
    """

    responses: tuple[int, ...]
    looks: int = 0


class Claimant:
    """Claims for `incarnation` of `slot`; a slot number beyond the plan's stands for a member without an assignment.

    `look`, `own_unit_ended` and `take` may have to read long journals. They return None after reading a part, and
    go on when called again; between two calls the caller can read the news of the responses in its hands.
    """

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        *,
        incarnation: str,
        slot: int,
        claim_ttl_s: float,
        clock: Clock,
        parallel_reads: int = PARALLEL_READS,
    ) -> None:
        self._store = store
        self._plan = plan
        self._incarnation = incarnation
        self._slot = slot
        self._claim_ttl_s = claim_ttl_s
        self._clock = clock
        self._looked_s = clock.monotonic()
        self._reader = JournalReader(store, plan, parallel_reads)
        self._liveness = Liveness(store, plan.iteration, clock, parallel_reads)
        self._rng = random.Random(incarnation)
        units = range(len(plan.slots))
        self._unit = {response: unit for unit in units for response in plan.responses_of(unit)}
        self._own_unit = plan.responses_of(slot) if slot < len(plan.slots) else ()
        self._trainers = {place.slot for place in plan.slots if place.pool == TRAIN_POOL}
        self._isolated = {place.slot for place in plan.slots if place.batch_max is not None}
        self._settled: dict[str, int] = {}
        self._asks = Asks(store, plan.iteration)
        self._open_asks: dict[str, _OpenAsk] = {}
        self.finished_siblings = FinishedSiblings(self._reader, incarnation, plan.num_generations)
        self.tokens_recovered = 0

    def closed(self) -> bool:
        """Whether the iteration is closed, after which no further token of the iteration is used."""
        return exists(self._store, layout.closed(self._plan.iteration))

    def owned(self) -> dict[int, int]:
        """The responses that the incarnation holds, with the epochs of the claims."""
        book = self._reader.book
        owners = {response: book.owner(response) for response in book.held_by(self._incarnation)}
        return {response: owner.epoch for response, owner in owners.items() if owner}

    @property
    def version(self) -> int:
        """A number that grows with every claim read."""
        return self._reader.book.version

    def refresh(self) -> None:
        """Read all new claims."""
        self._reader.book.refresh()

    def claims_made(self) -> int:
        return self._reader.book.claims_by(self._incarnation)

    def probe(self, responses: Collection[int]) -> bool:
        """Read new claims of other members on the units of `responses`; True if there were any."""
        units = sorted({self._unit[response] for response in responses})
        found = [self._reader.book.probe(unit) for unit in units]
        return any(found)

    def asked_for(self) -> tuple[int, ...]:
        """The responses for which other members have asked the incarnation since the last call."""
        return self._asks.read(self._incarnation)

    def take_own_slot(self) -> tuple[ClaimedResponse, ...]:
        """Claim at once the responses of the slot's earlier incarnations, and the unclaimed responses of its unit."""
        book = self._reader.book
        book.refresh()
        if self._slot >= len(self._plan.slots):
            return ()
        for unit in range(len(self._plan.slots)):
            while True:
                owners = {response: book.owner(response) for response in self._plan.responses_of(unit)}
                mine = {
                    response: owner.incarnation
                    for response, owner in owners.items()
                    if owner and owner.slot == self._slot and owner.incarnation != self._incarnation
                }
                unowned = unit == self._slot and (book.epoch(unit) == 0 or None in owners.values())
                if not mine and not unowned:
                    break
                if self._claim(unit, set(mine.values()), None if unit == self._slot else tuple(mine)):
                    break
        held = book.held_by(self._incarnation)
        order = {response: place for place, response in enumerate(self._own_unit)}
        return self._work(sorted(held, key=lambda response: (order.get(response, len(order)), response)))

    def look(self, claim_epochs: Mapping[int, int], *, held: int, released: int) -> Seen | None:
        """Read the heartbeats of members that may hold unfinished responses; call `refresh` before.

        claim_epochs: the epoch of the claim by response, for responses that the caller holds, has released or has
        ended. Any further response of the incarnation was claimed by a call that failed, and is returned as stray.
        held: the number of responses that the caller decodes or has with tools. released: the number of released
        responses that the caller may take again.
        """
        book = self._reader.book
        holdings, unclaimed = book.holdings(), len(book.unclaimed())
        stray = [response for response, epoch in self.owned().items() if claim_epochs.get(response) != epoch]
        if work := self._work([response for response in stray if not self._has_ended(response)]):
            return Seen(stray=work)
        names = [
            name for name in book.incarnations if name != self._incarnation and not self._is_settled(name, holdings)
        ]
        chosen = looked_at(names, self._rng)
        self._looked_s = self._clock.monotonic()
        signs = self._liveness.look(chosen)
        silent = [name for name, sign in signs.items() if holdings.get(name) and self._is_silent(sign)]
        if not (self._has_read(silent) and self._knows_ends(held for name in silent for held in holdings[name])):
            return None
        holders = {name: self._holder(name, sign, holdings.get(name, ())) for name, sign in signs.items()}
        seen = [sign.record for name, sign in signs.items() if sign.record and not holders[name].lost]
        for asked in self._open_asks.values():
            asked.looks += 1
        if released:
            holders[self._incarnation] = _own_released(self._incarnation, released)
        nothing_left = (
            not held
            and not unclaimed
            and len(chosen) == len(names)
            and all(holder.unfinished == 0 for holder in holders.values())
            and not book.refresh()  # nothing was claimed during the look
        )
        # Others of its own slot are dead or about to end, whatever their last heartbeats say.
        working = tuple(record for record in seen if record.state == "working" and self._is_crew(record.slot))
        working = tuple(record for record in working if record.slot != self._slot)
        return Seen(
            holders=holders,
            unseen=len(names) - len(chosen),
            unclaimed=unclaimed,
            nothing_left=nothing_left,
            working=working,
        )

    def own_unit_ended(
        self, claim_epochs: Mapping[int, int], *, cuts: bool = False, has_cut: bool = False
    ) -> bool | None:
        """Whether all responses of the slot's duty have ended, apart from the responses in the caller's own hands.

        A slot may leave once every response of its duty has ended: its first assignment; responses that the trainer
        holds; responses planned for the trainer that no other crew slot holds now; and, where members cut, also
        responses once held here that no other crew slot holds now. A cut removes from the duty the part of the first
        assignment that other crew slots hold. The reason: Flyte restarts a slot of the crew that dies, whereas a
        joined member may vanish unnoticed. An unclaimed response counts as not ended, and so does a response that a
        failed call claimed for the incarnation; claim_epochs: as in `look`.
        """
        book = self._reader.book
        answered = {response for response in self._own_unit if not (has_cut and self._is_with_crew(response))}
        if cuts:
            answered |= {r for r in self._unit if self._had(r) and not self._is_with_crew(r)}
        if self._trainers:
            answered |= {r for r in self._unit if self._is_from_trainer(r)}
        owners = {response: book.owner(response) for response in answered}
        asked = {
            response: owner.incarnation
            for response, owner in owners.items()
            if owner and (owner.incarnation != self._incarnation or owner.epoch != claim_epochs.get(response))
        }
        others = sorted(set(asked.values()) - {self._incarnation})
        if not (self._has_read(others) and self._knows_ends(asked)):
            return None
        return None not in owners.values() and all(self._has_ended(response) for response in asked)

    def _is_crew(self, slot: int) -> bool:
        """Whether this is a slot of the crew, which Flyte restarts when it dies, until the iteration is closed."""
        return slot < len(self._plan.slots) and slot not in self._trainers

    def _is_with_crew(self, response: int) -> bool:
        owner = self._reader.book.owner(response)
        return owner is not None and owner.slot != self._slot and self._is_crew(owner.slot)

    def _is_from_trainer(self, response: int) -> bool:
        owner = self._reader.book.owner(response)
        if owner is not None and owner.slot in self._trainers:
            return True
        return self._unit[response] in self._trainers and not self._is_with_crew(response)

    def _had(self, response: int) -> bool:
        book = self._reader.book
        return any(book.incarnations[name] == self._slot for name in book.former_owners(response))

    def _is_silent(self, sign: MemberSign) -> bool:
        """Whether only the journal can tell a member's unfinished responses, for want of a fresh heartbeat."""
        return sign.record is None or sign.lost(self._claim_ttl_s)

    def _has_read(self, incarnations: Sequence[str]) -> bool:
        """Read on in journals; returns whether all that they hold is read."""
        return self._reader.shards.advance_some(incarnations, SHARDS_A_CALL)

    def _has_reached(self, responses: Iterable[int]) -> bool:
        """Read further shards of the responses' earlier holders; returns whether the responses can be assembled."""
        shards, sealed = self._reader.shards, map(self._reader.book.sealed, responses)
        spans = (span for lineage in sealed for span in lineage)
        behind = {span.incarnation for span in spans if span.last_sequence > shards.last_sequence(span.incarnation)}
        return shards.advance_some(sorted(behind), SHARDS_A_CALL)

    def _knows_ends(self, responses: Iterable[int]) -> bool:
        """Read on until `_has_ended` needs no more shards for these responses; returns whether it needs none."""
        return self._has_reached([response for response in responses if response in self._reader.shards.ended])

    def _is_settled(self, name: str, holdings: dict[str, list[int]]) -> bool:
        return self._settled.get(name) == len(holdings.get(name, ()))

    def _holder(self, name: str, sign: MemberSign, held: Sequence[int]) -> Holder:
        lost, record = sign.lost(self._claim_ttl_s), sign.record
        # A heartbeat from before the member's last claim does not count what that claim took. One that tells of more
        # claims than were read here counts responses that are not known here.
        claims = self._reader.book.claims_by(name)
        current = record is not None and record.claims >= claims
        unfinished = record.unfinished if record and current else len(held)
        if record and record.claims == claims and not held:
            unfinished = 0
        if held and self._is_silent(sign):
            unfinished = sum(not self._has_ended(response) for response in held)
        if lost and not unfinished:
            self._settled[name] = len(held)
        return Holder(
            incarnation=name,
            lost=lost,
            idle=not lost and current and unfinished == 0,
            unfinished=unfinished,
            running=record.running if record else 0,
            waiting=min(record.waiting, len(held)) if record else 0,
            released=record.released if record else 0,
            tokens_per_s=record.tokens_per_s if record else None,
            plateau=record.plateau if record else 0,
            room=record.room if record else 0,
            isolated=self._reader.book.incarnations[name] in self._isolated,
        )

    def take(self, transfer: Transfer) -> Taken | None:
        """Claim the transfer's responses, unit by unit, up to the first unit that another member claimed earlier.

        With `asks` the holder is asked first; the responses are claimed when it has released them, or when it has not
        answered by the LOOKS_TO_ANSWER-th look.
        """
        holder = transfer.incarnation
        if holder is None:
            return self._claim_all(self._free(transfer.count), None, transfer.cause)
        if not (self._has_read([holder]) and self._has_reached(self._reader.book.holdings().get(holder, ()))):
            return None
        acting = not transfer.cause.from_the_living
        candidates = candidates_of(self._reader, holder, self._incarnation, acting=acting)
        if transfer.asks:
            asked = self._open_asks.get(holder)
            if asked is None:
                return self._ask(transfer, candidates)
            if asked.looks < LOOKS_TO_ANSWER:
                return Taken(asked=len(asked.responses))
            candidates = [candidate for candidate in candidates if candidate.response in asked.responses]
        self._open_asks.pop(holder, None)
        if self._clock.monotonic() - self._looked_s > self._claim_ttl_s:
            # A request took so long that a holder that looked dead may have come back. The next look will tell.
            return Taken()
        return self._claim_all(choose(transfer.cause, transfer.count, candidates), holder, transfer.cause)

    def _ask(self, transfer: Transfer, candidates: Sequence[Candidate]) -> Taken:
        """Ask the transfer's holder for the responses that `choose` prefers."""
        responses = choose(transfer.cause, transfer.count, candidates)
        if responses and transfer.incarnation is not None:
            self._asks.write(transfer.incarnation, AskRecord(asker=self._incarnation, responses=responses))
            self._open_asks[transfer.incarnation] = _OpenAsk(responses)
        return Taken(asked=len(responses))

    def _free(self, count: int) -> tuple[int, ...]:
        """Some unclaimed responses, from a random group on, or members that come together would race for the same."""
        free = self._reader.book.unclaimed()
        start = self._rng.randrange(0, max(1, len(free)), self._plan.num_generations)
        return tuple([*free[start:], *free[:start]][:count])

    def _claim_all(self, responses: Sequence[int], holder: str | None, cause: Cause) -> Taken:
        by_unit: dict[int, list[int]] = {}
        for response in responses:
            by_unit.setdefault(self._unit[response], []).append(response)
        taken: list[int] = []
        claims = 0
        for unit, found in by_unit.items():
            if not self._claim(unit, () if holder is None else (holder,), tuple(found)):
                break
            taken += found
            claims += 1
        if taken:
            log.info("slot %d: took %d responses: %s", self._slot, len(taken), cause.value)
        return Taken(self._work(taken), claims)

    def _claim(self, unit: int, predecessors: Collection[str], responses: tuple[int, ...] | None) -> bool:
        return take_over(
            self._store,
            self._plan,
            self._reader.book,
            self._reader.shards,
            unit=unit,
            incarnation=self._incarnation,
            slot=self._slot,
            predecessors=predecessors,
            responses=responses,
        )

    def _work(self, responses: Iterable[int]) -> tuple[ClaimedResponse, ...]:
        """The unfinished responses among newly claimed ones, with their journalled tokens."""
        work = []
        for response in responses:
            assembled = self._reader.assemble(response)
            owner = self._reader.book.owner(response)
            assert owner is not None, f"response {response} is held without a claim"
            assert owner.incarnation == self._incarnation, f"response {response} is held by {owner.incarnation}"
            self.tokens_recovered += assembled.policy_length
            if not assembled.finish.ends_response:
                prefix = tuple(assembled.token_ids.tolist())
                turns = assembled.events, assembled.turn_start, assembled.owes, assembled.restarts
                # Only those who answer turns ask for them.
                logprobs = tuple(assembled.logprobs.tolist()) if self._plan.config.get("turns") else ()
                work.append(ClaimedResponse(response, owner.epoch, prefix, *turns, logprobs))
        return tuple(work)

    def _has_ended(self, response: int) -> bool:
        shards = self._reader.shards
        return response in shards.ended and self._reader.assemble(response).finish.ends_response


def _own_released(incarnation: str, released: int) -> Holder:
    return Holder(
        incarnation=incarnation,
        lost=False,
        idle=False,
        unfinished=released,
        running=0,
        waiting=0,
        released=released,
        tokens_per_s=None,
        plateau=0,
    )
