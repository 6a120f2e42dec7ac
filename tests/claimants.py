"""Claimants of a small plan, and one look of theirs as the claim lane makes it."""

from dataclasses import replace

from storage.clock import ManualClock
from storage.journal.assembly import JournalReader
from storage.records import layout, records
from tasks.crew_model.rebalance import Seeker, Transfers
from tasks.sampling.session.claimant import Claimant
from tests.journals import a_plan, beat

TTL_S = 30.0
IDLE = Seeker(room=8, running=0)
PLAN = a_plan(4, 2, slots=2)  # slot 0: responses 0 1 4 5; slot 1: 2 3 6 7


def a_claimant(store, name="00001-me", slot=1, clock=None, plan=PLAN) -> Claimant:
    return Claimant(
        store, plan, incarnation=name, slot=slot, claim_ttl_s=TTL_S, clock=clock or ManualClock(), parallel_reads=1
    )


def say(store, name, number=1, **changes):
    record = beat(name, number=number)
    records.put(store, layout.alive(0, name), replace(record, **({"claims": 1} | changes)))


def owners(store, plan=PLAN):
    reader = JournalReader(store, plan)
    reader.refresh()
    found = [reader.book.owner(response) for response in range(plan.num_responses)]
    return [owner and owner.incarnation for owner in found]


def look(claimant, seeker, known, released=0):
    """One look and the transfers that follow, as the storage lane makes them: what was taken, and what was seen."""
    claimant.refresh()
    seen = claimant.look(known, held=seeker.held, released=released)
    taken = [*seen.stray]
    turns = Transfers(seeker, seen.holders, seen.unclaimed, seen.unseen)
    while not seen.stray and (transfer := turns.next()):
        work = claimant.take(transfer).work
        turns.took(transfer, len(work))
        taken += work
    return taken, seen


def seek(claimant, seeker, known, released=0):
    return look(claimant, seeker, known, released)[0]


def nothing_left(claimant, known):
    taken, seen = look(claimant, IDLE, known)
    assert taken == []
    return seen.nothing_left


def numbers(work) -> list[int]:
    return [item.response for item in work]
