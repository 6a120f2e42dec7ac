"""Rebalancing: decides which responses a member without work claims, and from which member, as pure functions.

The order follows RLBoost's Algorithm 2 (arXiv 2510.19225, section 4.2.1). First come responses without a living holder,
then unstarted responses of the fullest member. Running responses follow: beyond the batch size at which the holder's
decode rate stops rising, or of a holder slower than half of the seeker's own speed. A member takes no response from a
living holder that the member has held earlier, so a response is handed on at most once per member (no ping-pong).
Responses that the plan set apart for a small batch are not drawn into a large batch (StreamRL, arXiv 2504.15930,
Algorithm 2). `should_cut` decides when a member with few responses left hands its rest over and leaves.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

# The most members read in a look, so a thousand idle members do not read a million heartbeats.
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
        """Whether the holder would have continued the responses."""
        return self in (Cause.UNSTARTED, Cause.OVERFULL, Cause.LATE)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A member with responses, as shown to the seeker by the last heartbeat; the counts are as in HeartbeatRecord.

    Attributes:
        incarnation: The member's incarnation.
        lost: The member is lost or gone: its responses are free.
        idle: The member lives and looks for work, too.
        unfinished: Responses held.
        running: Responses decoded.
        waiting: Responses that wait for a place.
        released: Responses released.
        tokens_per_s: Tokens per second of all running responses; None: unknown; 0: stuck.
        plateau: The smallest batch near the best rate; 0: unknown.
        room: Further responses that the member would begin.
        isolated: The plan gave the member a small batch.
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

    Attributes:
        room: Responses that the seeker could begin now.
        running: Responses that the seeker decodes.
        held: Running responses, and responses that wait for a place or a tool.
        loaded: The weights are in place.
        tokens_per_s: Tokens per second of a single response by batch size, as far as measured; empty: not measured.
        free_only: The seeker takes nothing from living members, because the batch must stay small, or the seeker
            should leave soon.
    """

    room: int
    running: int
    held: int = 0
    loaded: bool = True
    tokens_per_s: Sequence[float] = ()
    free_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Take `count` responses.

    Attributes:
        cause: Why the responses change hands.
        incarnation: The holder; None: unclaimed responses.
        count: The number of responses.
        asks: The holder may have decoded tokens beyond the journal, so the seeker asks for the responses first.
    """

    cause: Cause
    incarnation: str | None
    count: int
    asks: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An unfinished response of the chosen holder, as shown by the journal.

    Attributes:
        response: The number of the response.
        length: Journalled tokens.
        begun: The holder has journalled tokens of the response.
        released: The holder has released the response.
        held_before: The seeker has held the response earlier.
    """

    response: int
    length: int
    begun: bool
    released: bool
    held_before: bool


def next_transfer(
    seeker: Seeker, holders: Sequence[Holder], unclaimed: int, share: int | None = None
) -> Transfer | None:
    """The transfer to make next; None without room, or without a response to take.

    share: the number of unclaimed and lost responses that the seeker may still take in this look; None: `free_share`.
    Unstarted work of an isolated member goes only to seekers without running responses.
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
            # The last responses stay, because two loading members would pass the responses to and fro.
            count = min(count, fullest.waiting // (idle + 1))
        if count:
            # The taken responses are the last of the queue, and begun only if the holder has since ended about as many
            # responses as stand in front.
            asks = fullest.waiting - count < fullest.running
            return Transfer(cause=Cause.UNSTARTED, incarnation=fullest.incarnation, count=count, asks=asks)
    return None if seeker.running else _running_transfer(seeker, living)


def free_share(seeker: Seeker, holders: Collection[Holder], unclaimed: int, unseen: int = 0) -> int:
    """The number of unclaimed and lost responses that the seeker takes in one look; at least one.

    Water-filling: the seeker fills up to the level at which all members with room together hold the free responses, so
    the first look does not take all. Members without room do not count. A `free_only` seeker takes an equal share with
    the members that have nothing left. unseen: the number of members outside `holders`; the share of members with room
    is taken to be as among `holders`, and the unclaimed responses are divided among seen and unseen members.
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
    # The lowest level at which all together have room for the free responses.
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
    """The transfers of a single look: at most one from each source, while the seeker has room.

    holders: the members read in the look, by incarnation. unclaimed: the number of unclaimed responses. unseen: the
    number of further members.
    """

    def __init__(self, seeker: Seeker, holders: Mapping[str, Holder], unclaimed: int, unseen: int = 0) -> None:
        self._seeker = seeker
        self._holders = dict(holders)
        self._unclaimed = unclaimed
        self._free = _free(holders.values(), unclaimed)
        self._share = free_share(seeker, holders.values(), unclaimed, unseen) if self._free else 0

    def next(self) -> Transfer | None:
        """The transfer to make now; None when the look is over."""
        # Free responses that are left to peers are no reason to take running responses of peers.
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
    """The members to read in a look: all `names`, or a random choice of LOOKS_MAX names."""
    return list(names) if len(names) <= LOOKS_MAX else rng.sample(names, LOOKS_MAX)


def choose(cause: Cause, count: int, candidates: Collection[Candidate]) -> tuple[int, ...]:
    """The responses of a holder to take for `cause`; `candidates` stand in the holder's order of beginning.

    Unstarted responses come from the end of the order, because the holder begins at the front. Running responses come
    with the fewest tokens first, because short prefixes are cheapest to compute again.
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
    # From a stuck member all is taken; from a slow member, half.
    stuck = not slowest.tokens_per_s
    count = min(seeker.room, slowest.running if stuck else (slowest.running + 1) // 2)
    if stuck or _of_one(slowest) < LATE_RATIO * _expected(seeker, count, slow):
        return Transfer(cause=Cause.LATE, incarnation=slowest.incarnation, count=count, asks=True)
    return None


def _of_one(holder: Holder) -> float:
    """Tokens per second of a single running response of the holder."""
    return (holder.tokens_per_s or 0.0) / holder.running


def _expected(seeker: Seeker, batch: int, others: Sequence[Holder]) -> float:
    """Tokens per second of a single response if the seeker decodes `batch`.

    Without a measurement of `batch`, the median of the running holders: a cautious guess, from equal or larger batches.
    """
    if len(seeker.tokens_per_s) > batch:
        return seeker.tokens_per_s[batch]
    rates = sorted(_of_one(holder) for holder in others)
    return rates[len(rates) // 2]


def _share(count: int, sharers: int, room: int) -> int:
    return min(room, -(-count // sharers))


def should_cut(ended: int, total: int, unfinished: int, rooms_of_others: Collection[int], share: float | None) -> bool:
    """Whether a member hands over all its `unfinished` responses (RLHFless, arXiv 2602.22718, section 4.3, step 4).

    All responses must fit elsewhere, because a single response that stays keeps the machine.

    Args:
        ended: Ended responses of the member's plan.
        total: Responses of the member's plan.
        unfinished: Responses that the member holds.
        rooms_of_others: For each competing running member, the further responses that the member could begin.
        share: tau, the least ended share; None: never.

    Raises ValueError if `ended` is not within 0 and `total`.
    """
    if not 0 <= ended <= total:
        raise ValueError(f"ended: {ended} given; allowed: 0 to total ({total})")
    if share is None or not total or not unfinished:
        return False
    return ended / total >= share and unfinished <= sum(max(0, room) for room in rooms_of_others)
