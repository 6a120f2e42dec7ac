"""Claims: the owner of each response, and the earlier shards that count; and asks (docs/format.md section 5).

The responses of a slot's first assignment form a unit. The claims of a unit are a log, serialised by create-if-absent.
Applying the log in epoch order gives every response one owner and one lineage, whatever else lies in the journal.

With an ask, a member that could decode a running response asks its holder to hand the response over. A claim on a
running response loses the tokens since the last flush of its holder; a holder with an ask flushes first and releases
the response afterwards. Asks are hints: a damaged or unanswered ask changes nothing.
"""

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar

from storage.journal.journal import PARALLEL_READS, ShardReader
from storage.records import layout, records
from storage.records.records import STRICT, ClaimRecord, PlanRecord, Span, nonce
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)
# Those of members have 22 characters; a key has room for so many.
_INCARNATION = re.compile(r"\w[\w-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Owner:
    """The last claim on a response: the epoch of the claim, its incarnation, and the slot of the incarnation."""

    epoch: int
    incarnation: str
    slot: int


class ClaimBook:
    """The claims of an iteration that were read so far, applied in order."""

    def __init__(self, store: ObjectStore, plan: PlanRecord, parallel_reads: int = PARALLEL_READS) -> None:
        self._store = store
        self._parallel_reads = parallel_reads
        self._plan = plan
        self._epochs = [0] * len(plan.slots)
        self._owners: dict[int, Owner] = {}
        self._sealed: dict[int, list[Span]] = defaultdict(list)
        self._former: dict[int, set[str]] = defaultdict(set)
        self._moved = 0
        self._claims: Counter[str] = Counter()
        self.version = 0  # grows with every claim applied
        self._incarnations: dict[str, int] = {}

    @property
    def incarnations(self) -> dict[str, int]:
        """Every incarnation that owns or owned a response, with its slot, in the order seen."""
        return self._incarnations

    def epoch(self, unit: int) -> int:
        """The last epoch of a unit that was applied; 0 stands for the plan, before the first claim."""
        return self._epochs[unit]

    def owner(self, response: int) -> Owner | None:
        """The present owner of a response; None before its first claim."""
        return self._owners.get(response)

    def sealed(self, response: int) -> tuple[Span, ...]:
        """The frozen part of a response's lineage: the spans of its earlier owners."""
        return tuple(self._sealed.get(response, ()))

    def holders(self, responses: Sequence[int]) -> dict[str, None]:
        """The present owners of these responses, in the order met; the values are None."""
        owners = self._owners
        return dict.fromkeys(owners[response].incarnation for response in responses if response in owners)

    def handed_over(self, responses: Sequence[int]) -> list[int]:
        """The given responses that have changed owner at least once."""
        return [response for response in responses if response in self._sealed]

    def held_by(self, incarnation: str) -> set[int]:
        """The responses that an incarnation owns now."""
        return {response for response, owner in self._owners.items() if owner.incarnation == incarnation}

    def former_owners(self, response: int) -> frozenset[str]:
        """The incarnations that owned a response and lost it to a later owner."""
        return frozenset(self._former.get(response, ()))

    @property
    def moved(self) -> int:
        """How many times a response went from one slot to another."""
        return self._moved

    def holdings(self) -> dict[str, list[int]]:
        """The responses that each incarnation owns now, finished or not, unit by unit in starting order."""
        held: dict[str, list[int]] = {}
        for unit in range(len(self._epochs)):
            for response in self._plan.responses_of(unit):
                owner = self._owners.get(response)
                if owner is not None:
                    held.setdefault(owner.incarnation, []).append(response)
        return held

    def claims_by(self, incarnation: str) -> int:
        """How many claims an incarnation has made."""
        return self._claims[incarnation]

    def unclaimed(self) -> list[int]:
        """Responses without a claim yet, unit by unit in starting order."""
        units = range(len(self._epochs))
        return [
            response for unit in units for response in self._plan.responses_of(unit) if response not in self._owners
        ]

    def owners_of(self, unit: int) -> set[Owner]:
        """The present owners of a unit's responses."""
        owners = (self._owners.get(response) for response in self._plan.responses_of(unit))
        return {owner for owner in owners if owner is not None}

    def refresh(self) -> bool:
        """Read and apply all new claims, with a single LIST; True if the LIST showed a new claim."""
        fresh: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for key in self._store.list(layout.claims(self._plan.iteration)):
            address = layout.claim_address(key)
            if address is None:
                continue
            unit, epoch = address
            if unit >= len(self._epochs):
                raise CorruptObject(key, f"unit {unit}; the plan has {len(self._epochs)}")
            if epoch > self._epochs[unit]:
                fresh[unit].append((epoch, key))
        keys = [key for unit_claims in fresh.values() for _, key in sorted(unit_claims)]
        if self._parallel_reads == 1 or len(keys) <= 1:
            bodies = [self._store.get(key) for key in keys]
        else:
            with ThreadPoolExecutor(min(self._parallel_reads, len(keys))) as pool:
                bodies = list(pool.map(self._store.get, keys))
        for key, body in zip(keys, bodies, strict=True):
            self.apply(_claim(key, body))
        return bool(fresh)

    def probe(self, unit: int) -> bool:
        """Read and apply the next claims of one unit, with a single GET without news; True if a claim was applied."""
        found = False
        while True:
            key = layout.claim(self._plan.iteration, unit, self._epochs[unit] + 1)
            try:
                self.apply(_claim(key, self._store.get(key)))
            except ObjectMissing:
                return found
            found = True

    def apply(self, claim: ClaimRecord) -> None:
        """Apply the next claim of a unit's log; raises CorruptObject if the claim cannot follow."""
        key = layout.claim(self._plan.iteration, claim.unit, claim.epoch)
        if claim.epoch != self._epochs[claim.unit] + 1:
            raise CorruptObject(key, f"epoch {claim.epoch} after {self._epochs[claim.unit]}: a claim is missing")
        of_unit = self._plan.responses_of(claim.unit)
        if claim.responses is not None and not set(claim.responses) <= set(of_unit):
            raise CorruptObject(key, "it takes responses of another unit")
        owner = Owner(claim.epoch, claim.incarnation, claim.slot)
        for response in of_unit if claim.responses is None else claim.responses:
            before = self._owners.get(response)
            if before is not None and before.incarnation not in claim.sealed:
                if claim.responses is None:
                    continue
                raise CorruptObject(key, f"it takes response {response} without sealing its owner")
            if before is not None:
                self._former[response].add(before.incarnation)
                self._moved += before.slot != owner.slot
            if before is not None and claim.sealed[before.incarnation] >= 0:
                last = claim.sealed[before.incarnation]
                span = Span(epoch=before.epoch, incarnation=before.incarnation, last_sequence=last)
                spans = self._sealed[response]
                assert not spans or spans[-1].epoch < span.epoch, f"{key}: the lineage of {response} goes back"
                spans.append(span)
            self._owners[response] = owner
            assert before is None or before.epoch < owner.epoch, f"{key}: response {response} goes back to its owner"
        self._epochs[claim.unit] = claim.epoch
        self._incarnations.setdefault(claim.incarnation, claim.slot)
        self._claims[claim.incarnation] += 1
        self.version += 1


def _claim(key: str, body: bytes) -> ClaimRecord:
    """The claim in the bytes read from `key`; raises CorruptObject, also for a claim of another unit or epoch."""
    claim = records.decode(ClaimRecord, key, body)
    if (claim.unit, claim.epoch) != layout.claim_address(key):
        raise CorruptObject(key, f"it is the claim of unit {claim.unit}, epoch {claim.epoch}")
    for name in (claim.incarnation, *claim.sealed):
        if not _INCARNATION.fullmatch(name):
            raise CorruptObject(key, f"incarnation {name[:200]!r}; allowed: a part of a key")
    return claim


def take_over(
    store: ObjectStore,
    plan: PlanRecord,
    book: ClaimBook,
    shards: ShardReader,
    *,
    unit: int,
    incarnation: str,
    slot: int,
    predecessors: Collection[str],
    responses: tuple[int, ...] | None = None,
) -> bool:
    """Claim the responses of a unit that `predecessors` own or no one owns; False if another claim came first.

    Sealing comes first: the predecessors' shards up to now count, and their later rows of these responses are void.
    `responses` narrows the claim to some; their owners must be among `predecessors`. After False the book holds the
    claim that won, and the caller decides anew.
    """
    sealed = {name: shards.advance(name) for name in sorted(predecessors)}
    claim = ClaimRecord(
        unit=unit,
        epoch=book.epoch(unit) + 1,
        incarnation=incarnation,
        slot=slot,
        responses=responses,
        sealed=sealed,
    )
    if records.commit(store, layout.claim(plan.iteration, unit, claim.epoch), claim):
        book.apply(claim)
        return True
    book.probe(unit)
    return False


@dataclass(frozen=True, kw_only=True)
class AskRecord:
    """An incarnation asks for `responses` of another incarnation."""

    KIND: ClassVar[str] = "ask"
    __pydantic_config__ = STRICT
    asker: str
    responses: tuple[int, ...]
    nonce: str = field(default_factory=nonce)


class Asks:
    """The asks of an iteration, as a member writes and reads them. Asks to one holder are numbered without gaps."""

    def __init__(self, store: ObjectStore, iteration: int) -> None:
        self._store = store
        self._iteration = iteration
        self._next: Counter[str] = Counter()

    def write(self, holder: str, ask: AskRecord) -> None:
        """Ask a holder."""
        while not records.commit(self._store, self._key(holder), ask):
            self._next[holder] += 1
        self._next[holder] += 1

    def read(self, holder: str) -> tuple[int, ...]:
        """The responses that the holder was asked for since the last call, with one GET if there is no ask."""
        responses: list[int] = []
        while True:
            try:
                responses += records.read(self._store, AskRecord, self._key(holder)).responses
            except ObjectMissing:
                return tuple(responses)
            except CorruptObject as error:
                log.warning("an ask is passed over: %s", error)
            self._next[holder] += 1

    def _key(self, holder: str) -> str:
        return layout.ask(self._iteration, holder, self._next[holder])
