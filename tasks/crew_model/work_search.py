"""A look for work, as by the session's claimant: the peers as a member sees them, and the responses to take.

The rules are production's (tasks/crew_model/rebalance.py).
"""

import random
from collections.abc import Callable

from tasks.crew_model.crew_member import ModelMember
from tasks.crew_model.ownership import Ownership
from tasks.crew_model.rebalance import (
    LOOKS_MAX,
    Candidate,
    Holder,
    Seeker,
    Transfer,
    Transfers,
    choose,
    looked_at,
    next_transfer,
)

# Called with the seeker, the holder and the responses.
Ask = Callable[[ModelMember, ModelMember, tuple[int, ...]], None]
# After FRUITLESS fruitless looks in a row, a check whether any member can find work pays.
FRUITLESS = 4


class WorkSearch:
    """The members as seen at a single moment, for one look or for a round of looks.

    free_only: no member takes responses that a living holder would continue. ask: called with the seeker, the holder
    and the responses, if the holder may have decoded tokens of the responses beyond the journal.
    """

    def __init__(
        self, ownership: Ownership, rng: random.Random, *, now_s: float, claim_ttl_s: float, free_only: bool, ask: Ask
    ) -> None:
        self._ownership = ownership
        self._rng = rng
        self._now_s = now_s
        self._claim_ttl_s = claim_ttl_s
        self._free_only = free_only
        self._ask = ask
        self._seen: dict[str, Holder] = {}
        self._hopeful: dict[tuple[int, bool, bool, bool, bool], bool] = {}
        self._fruitless = 0
        self._waits: bool | None = None

    def seek(self, member: ModelMember) -> list[str]:
        """Take responses by the rules until the member has no room or finds no work; returns the givers, in order.

        At most LOOKS_MAX peers are looked at, and each peer gives once.
        """
        members = self._ownership.members
        member.life.looks += min(LOOKS_MAX, len(members) - 1)
        if member.running and not self._anything_waits():
            # Running responses are given only to members that decode nothing.
            return []
        seeker = self._seeker(member)
        if not self._may_find(member, seeker):
            return []
        others = [name for name in members if name != member.name]
        names = looked_at(others, self._rng)
        holders = {name: self._holder(members[name]) for name in names}
        turns = Transfers(seeker, holders, self._unclaimed(), len(others) - len(names))
        givers: list[str] = []
        self._fruitless += 1
        while transfer := turns.next():
            if transfer.asks and transfer.incarnation is not None:
                turns.took(transfer, self._ask_for(member, transfer))
                continue
            turns.took(transfer, self._take(member, transfer))
            if transfer.incarnation is not None:
                givers.append(transfer.incarnation)
        return givers

    def _anything_waits(self) -> bool:
        """Whether any response is unclaimed, left behind, or waits for a place; remembered until a transfer."""
        if self._waits is None:
            members = self._ownership.members.values()
            self._waits = bool(self._ownership.unclaimed) or any(not m.alive or m.waiting for m in members)
        return self._waits

    def _may_find(self, member: ModelMember, seeker: Seeker) -> bool:
        """Whether the rules give the seeker a response from any single member; if not, several members give none.

        The check is made only after FRUITLESS fruitless looks, and once for all alike seekers until the next transfer.
        """
        if self._fruitless < FRUITLESS:
            return True
        alike = (id(member.engine), bool(seeker.tokens_per_s), seeker.loaded, seeker.running > 0, seeker.free_only)
        if alike not in self._hopeful:
            unclaimed = self._unclaimed()
            self._hopeful[alike] = unclaimed > 0 or any(
                next_transfer(seeker, [self._holder(other)], 0) for other in self._ownership.members.values()
            )
        return self._hopeful[alike]

    def _seeker(self, member: ModelMember) -> Seeker:
        return Seeker(
            room=member.room,
            running=len(member.running),
            held=member.unfinished,
            loaded=member.state == "working",
            tokens_per_s=member.tokens_per_s,
            free_only=self._free_only or member.isolated,
        )

    def _holder(self, member: ModelMember) -> Holder:
        if member.name not in self._seen:
            member.advance(self._now_s)
            self._seen[member.name] = _seen(member, self._now_s, self._claim_ttl_s)
        return self._seen[member.name]

    def _unclaimed(self) -> int:
        return sum(len(responses) for responses in self._ownership.unclaimed.values())

    def _ask_for(self, member: ModelMember, transfer: Transfer) -> int:
        """Ask the holder for responses, unless an ask is open; returns the number of asked responses."""
        holder = self._ownership.members[transfer.incarnation or ""]
        if holder.name in member.open_asks:
            return member.open_asks[holder.name]
        chosen = choose(transfer.cause, transfer.count, _candidates(self._ownership, member, holder))
        if chosen:
            self._fruitless = 0
            member.open_asks[holder.name] = len(chosen)
            self._ask(member, holder, chosen)
        return len(chosen)

    def _take(self, member: ModelMember, transfer: Transfer) -> int:
        self._hopeful.clear()
        self._fruitless = 0
        self._waits = None
        self._seen.pop(member.name, None)
        if transfer.incarnation is None:
            # Starting at a random unit, as a claimant does, so members take from different ends.
            found = self._ownership.unclaimed_from(self._rng.randrange(len(self._ownership.unclaimed)), transfer.count)
            self._ownership.take_unclaimed(member, found)
            return len(found)
        holder = self._ownership.members[transfer.incarnation]
        del self._seen[holder.name]
        chosen = choose(transfer.cause, transfer.count, _candidates(self._ownership, member, holder))
        self._ownership.take(member, holder, chosen)
        return len(chosen)


def _seen(member: ModelMember, now_s: float, claim_ttl_s: float) -> Holder:
    """A member as shown by its heartbeat; a dead member's last heartbeat counts until `claim_ttl_s` of silence."""
    running, unfinished = len(member.running) + len(member.journalled), member.unfinished
    return Holder(
        incarnation=member.name,
        lost=member.state == "gone" or (member.state == "dead" and now_s >= member.ended_s + claim_ttl_s),
        idle=member.alive and unfinished == 0,
        unfinished=unfinished,
        running=running,
        waiting=unfinished - running - len(member.acting),
        released=0,
        tokens_per_s=running / float(member.engine.step_s[running]) if running else None,
        plateau=member.plateau if running else 0,
        room=member.room if member.alive else 0,
        isolated=member.set_apart,
    )


def _candidates(ownership: Ownership, seeker: ModelMember, holder: ModelMember) -> list[Candidate]:
    """The holder's running and waiting responses. Responses that wait for a tool stay with a living holder."""
    kept, begun = ownership.responses.journalled_tokens, holder.begun
    return [
        Candidate(
            response=response,
            length=int(kept[response] + (holder.decoded(response) if response in holder.running else 0)),
            begun=response in begun,
            released=False,
            held_before=ownership.held_before(seeker, response),
        )
        for response in [*holder.running, *holder.waiting]
    ]
