"""Rebalancing: decides which responses a member without work claims, and from which member, as pure functions.

It follows RLBoost's Algorithm 2 (arXiv 2510.19225, section 4.2.1): first responses that no living member works on, then
unstarted ones of the fullest member, then running ones beyond the batch size at which that member's decode rate stops
rising; and running ones of a member that decodes them at less than half of our own speed. A member never takes back
from a living one what it has held before, so a response is handed on at most once per member (no ping-pong). Responses
that the plan set apart for a small batch are not drawn into a large one (StreamRL, arXiv 2504.15930, Algorithm 2).
`should_cut` says when a member that has ended most of its responses hands the others over and leaves.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

# The most members that one look looks at, so that a thousand idle members do not read a million heartbeats.
LOOKS_MAX = 32
LATE_RATIO = 0.5


class Cause(Enum):
    """Why responses change hands."""

    UNCLAIMED = "no member has claimed them"
    LOST = "their holder is lost or gone"
    RELEASED = "their holder released them"
    UNSTARTED = "their holder has not begun them"
    OVERFULL = "their holder's decode rate does not suffer"
    LATE = "their holder is slow"

    @property
    def from_the_living(self) -> bool:
        """Whether the holder would have continued them."""
        return self in (Cause.UNSTARTED, Cause.OVERFULL, Cause.LATE)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A member with responses, as its last heartbeat shows it to the seeker; the counts are those of AliveRecord.

    lost: what it holds is free; idle: it lives and looks for work, too. room: how many more responses it would begin.
    isolated: the plan gave it a small batch.
    """

    incarnation: str
    lost: bool
    idle: bool
    unfinished: int
    running: int
    waiting: int
    released: int
    tokens_per_s: float | None
    plateau: int
    room: int = 0
    isolated: bool = False


@dataclass(frozen=True, kw_only=True)
class Seeker:
    """The member that looks for work.

    room: responses it could begin now; running: those it decodes; held: those, and what waits, also for tools. loaded:
    whether it has the weights. tokens_per_s: of one response, by the number decoded together, as far as it was measured
    (empty: not yet). free_only: it takes nothing from living members, because its batch must stay small, or it should
    leave soon.
    """

    room: int
    running: int
    held: int = 0
    loaded: bool = True
    tokens_per_s: Sequence[float] = ()
    free_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Take `count` responses from `incarnation`; None: unclaimed ones.

    asks: the holder may have decoded tokens of them that are not journalled, so it is asked for them first.
    """

    cause: Cause
    incarnation: str | None
    count: int
    asks: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An unfinished response of the chosen holder, as the journal shows it.

    length: tokens journalled; begun: whether its holder has journalled some; held_before: by the seeker.
    """

    response: int
    length: int
    begun: bool
    released: bool
    held_before: bool


def next_transfer(
    seeker: Seeker, holders: Sequence[Holder], unclaimed: int, share: int | None = None
) -> Transfer | None:
    """The transfer to make next; None if there is no room, or nothing to take.

    share: how many responses of the unclaimed and the lost the seeker may still take in this look; None: `free_share`.
    Unstarted work of an isolated member goes only to members that decode nothing else.
    """
    if seeker.room < 1:
        return None
    idle = 1 + sum(holder.idle for holder in holders)
    living = [holder for holder in holders if not holder.lost]
    lost = [holder for holder in holders if holder.lost and holder.unfinished]
    free = [Transfer(cause=Cause.LOST, incarnation=h.incarnation, count=h.unfinished) for h in lost]
    if unclaimed:
        free.append(Transfer(cause=Cause.UNCLAIMED, incarnation=None, count=unclaimed))
    free += [Transfer(cause=Cause.RELEASED, incarnation=h.incarnation, count=h.released) for h in living if h.released]
    if free:
        most = max(free, key=lambda transfer: transfer.count)
        count = _share(most.count, idle, seeker.room)
        if most.cause is not Cause.RELEASED:
            share = free_share(seeker, holders, unclaimed) if share is None else share
            count = min(most.count, seeker.room, share)
        return Transfer(cause=most.cause, incarnation=most.incarnation, count=count) if count else None
    if seeker.free_only:
        return None
    open_to_us = [holder for holder in living if not (holder.isolated and seeker.running)]
    fullest = max(open_to_us, key=lambda holder: holder.waiting, default=None)
    if fullest is not None and fullest.waiting:
        count = _share(fullest.waiting, idle + 1, seeker.room)
        if not seeker.loaded:
            # The last ones stay, because two members that are still loading would pass them to and fro.
            count = min(count, fullest.waiting // (idle + 1))
        if count:
            # They are the last of its queue. It has begun them only if it has since ended about as many as come before.
            asks = fullest.waiting - count < fullest.running
            return Transfer(cause=Cause.UNSTARTED, incarnation=fullest.incarnation, count=count, asks=asks)
    return None if seeker.running else _running_transfer(seeker, living)


def free_share(seeker: Seeker, holders: Collection[Holder], unclaimed: int, unseen: int = 0) -> int:
    """How many of the unclaimed and the lost responses the seeker takes in one look; at least one.

    It fills up to the level at which it and the other members with room hold all that is free, so that the first that
    looks does not take all. Members without room take none, and do not count. If it takes only what is free, it takes
    an equal share with the members that have nothing left. unseen: how many more members there are; of them the same
    part has room as of the holders, and the unclaimed responses, which the holders do not show, are theirs as well.
    """
    takers = [each for each in holders if (each.idle if seeker.free_only else each.room) and not each.lost]
    if unseen and holders:
        seen = (1 + len(takers)) * len(holders)
        unclaimed = -(-unclaimed * seen // (seen + unseen * len(takers)))
    free = _free(holders, unclaimed)
    if seeker.free_only:
        return -(-free // (1 + len(takers)))
    fills = [(seeker.held, seeker.room), *((each.unfinished, each.room) for each in takers)]
    low, high = 0, max(held + room for held, room in fills)
    # The lowest level at which all of them together have room for what is free.
    while low < high:
        level = (low + high) // 2
        if sum(min(room, max(0, level - held)) for held, room in fills) < free:
            low = level + 1
        else:
            high = level
    return max(1, low - seeker.held)


def _free(holders: Collection[Holder], unclaimed: int) -> int:
    return unclaimed + sum(holder.unfinished for holder in holders if holder.lost)


class Transfers:
    """The transfers of one look: at most one from each source, while there is room.

    holders: the members that were looked at, by incarnation. unclaimed: how many responses have no claim. unseen: how
    many more members there are.
    """

    def __init__(self, seeker: Seeker, holders: Mapping[str, Holder], unclaimed: int, unseen: int = 0) -> None:
        self._seeker = seeker
        self._holders = dict(holders)
        self._unclaimed = unclaimed
        self._free = _free(holders.values(), unclaimed)
        self._share = free_share(seeker, holders.values(), unclaimed, unseen) if self._free else 0

    def next(self) -> Transfer | None:
        """The transfer to make now; None when the look is over."""
        # What is free and left to others is not a reason to take what others decode.
        if self._free and self._share < 1:
            return None
        return next_transfer(self._seeker, list(self._holders.values()), self._unclaimed, self._share)

    def took(self, transfer: Transfer, count: int) -> None:
        """Note that the transfer was tried and brought `count` responses."""
        room, running, held = self._seeker.room - count, self._seeker.running + count, self._seeker.held + count
        self._seeker = replace(self._seeker, room=room, running=running, held=held)
        if transfer.cause in (Cause.UNCLAIMED, Cause.LOST):
            self._free -= count
            self._share -= count
        if transfer.incarnation is None:
            self._unclaimed = 0
        else:
            del self._holders[transfer.incarnation]


def looked_at(names: Sequence[str], rng: random.Random) -> list[str]:
    """The members at which one look looks: all of `names`, or LOOKS_MAX of them, chosen at random."""
    return list(names) if len(names) <= LOOKS_MAX else rng.sample(names, LOOKS_MAX)


def choose(cause: Cause, count: int, candidates: Collection[Candidate]) -> tuple[int, ...]:
    """The responses of a holder to take for `cause`; `candidates` in the order in which the holder begins them.

    Unstarted ones come from the end of that order, because the holder begins at its front. Of running ones, those with
    the fewest tokens come first, because their prefixes are cheapest to compute again.
    """
    if cause is Cause.RELEASED:
        fit = [candidate for candidate in candidates if candidate.released]
    elif cause is Cause.UNSTARTED:
        fit = [candidate for candidate in candidates if not candidate.begun and not candidate.held_before][::-1]
    elif cause.from_the_living:
        fit = [candidate for candidate in candidates if candidate.begun and not candidate.held_before]
        fit.sort(key=lambda candidate: candidate.length)
    else:
        fit = list(candidates)
    return tuple(candidate.response for candidate in fit[:count])


def _running_transfer(seeker: Seeker, living: Sequence[Holder]) -> Transfer | None:
    overfull = [holder for holder in living if 0 < holder.plateau < holder.running]
    if overfull:
        fullest = max(overfull, key=lambda holder: holder.running)
        count = min(seeker.room, fullest.running - fullest.plateau, fullest.running // 2)
        if count:
            return Transfer(cause=Cause.OVERFULL, incarnation=fullest.incarnation, count=count, asks=True)
    slow = [h for h in living if h.running and h.tokens_per_s is not None]
    slowest = min(slow, key=_of_one, default=None)
    if slowest is None:
        return None
    # From a member that decodes nothing all is taken; from one that is only slow, half.
    stuck = not slowest.tokens_per_s
    count = min(seeker.room, slowest.running if stuck else (slowest.running + 1) // 2)
    if stuck or _of_one(slowest) < LATE_RATIO * _expected(seeker, count, slow):
        return Transfer(cause=Cause.LATE, incarnation=slowest.incarnation, count=count, asks=True)
    return None


def _of_one(holder: Holder) -> float:
    """Tokens per second of one of a holder's running responses."""
    return (holder.tokens_per_s or 0.0) / holder.running


def _expected(seeker: Seeker, batch: int, others: Sequence[Holder]) -> float:
    """Tokens per second of one response if the seeker decodes `batch`; if it has not measured that, the others' median.

    That median, from equal or larger batches, is a cautious guess.
    """
    if len(seeker.tokens_per_s) > batch:
        return seeker.tokens_per_s[batch]
    rates = sorted(_of_one(holder) for holder in others)
    return rates[len(rates) // 2]


def _share(count: int, sharers: int, room: int) -> int:
    return min(room, -(-count // sharers))


def should_cut(ended: int, total: int, unfinished: int, rooms_of_others: Collection[int], share: float | None) -> bool:
    """Whether a member hands over all `unfinished` responses that it holds (RLHFless, section 4.3, step 4).

    ended, total: among the responses it was planned for. rooms_of_others: for each of the other running members, how
    many responses it could begin besides its own. share: tau; None: never. All must fit, because one that stays keeps
    the machine, too. arXiv 2602.22718.
    """
    if not 0 <= ended <= total:
        raise ValueError(f"ended: {ended} given; allowed: 0 to total ({total})")
    if share is None or not total or not unfinished:
        return False
    return ended / total >= share and unfinished <= sum(max(0, room) for room in rooms_of_others)
