"""The view of a watcher on an iteration, as values: crew, totals, and the groups that the trainer waits for.

Pure functions of a plan, the claims, the responses' progress and the heartbeats; no store, no clock, no screen.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from storage.journal.claims import ClaimBook
from storage.records.crew_records import HeartbeatRecord
from storage.records.failures import FailureRecord
from storage.records.records import JOINED_POOL, TRAIN_POOL, PlanRecord

Phase = Literal["no run", "planning", "rollout", "training", "publishing", "committed", "ended"]
MemberState = Literal["not come", "unknown", "loading", "working", "gone", "silent"]
GROUPS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class WatchedHeartbeat:
    """The last heartbeat of a member, and its age on the watcher's own clock.

    Attributes:
        record: The heartbeat; None if missing or unreadable.
        unchanged_s: For how long the watcher has read an unchanged heartbeat.
        seen_to_change: Whether the watcher has seen a change.
    """

    record: HeartbeatRecord | None
    unchanged_s: float = 0.0
    seen_to_change: bool = False

    def state(self, silent_after_s: float) -> MemberState:
        """The member's state; "silent" if its heartbeat has not changed for `silent_after_s`."""
        if (self.record is None or self.record.state != "gone") and self.unchanged_s >= silent_after_s:
            return "silent"
        return "unknown" if self.record is None else self.record.state

    def is_alive(self, silent_after_s: float) -> bool:
        """Return True unless the member has said good-bye or is silent."""
        return self.state(silent_after_s) not in ("gone", "silent")


UNREAD = WatchedHeartbeat(None)


@dataclass(frozen=True, slots=True)
class Progress:
    """The durable part of a response.

    Attributes:
        tokens: Durable tokens.
        done: Whether the response has ended, or is recorded by the trainer.
        released: Whether the holder has handed the response over.
    """

    tokens: int = 0
    done: bool = False
    released: bool = False


@dataclass(frozen=True, kw_only=True)
class MemberView:
    """A member of the crew, or a slot that no member has filled.

    Numbers come from the member's heartbeat, except `unfinished`.

    Attributes:
        slot: The slot.
        joined: Whether the member joined from outside.
        incarnation: The process life; None for an unfilled slot.
        pool: The pool of the slot.
        host: The machine.
        state: "silent": the other members take the member for dead. "unknown": claims without a readable heartbeat.
        heartbeat_age_s: Seconds since the last change of the heartbeat; None without a change.
        unfinished: Held responses that have not ended, by the journal.
        running: Responses that the engine decodes.
        waiting: Responses that wait for the engine.
        acting: Responses that wait for the answer of a tool.
        tokens_per_s: Recent speed of decoding; None without a measured speed.
        tokens_generated: Tokens decoded by the process.
        tokens_recovered: Tokens taken over from the journal.
        usd_per_h: The price of the machine; None if the member is gone, or the price is unknown.
    """

    slot: int
    joined: bool
    incarnation: str | None = None
    pool: str = ""
    host: str = ""
    state: MemberState
    heartbeat_age_s: float | None = None
    unfinished: int
    running: int = 0
    waiting: int = 0
    acting: int = 0
    tokens_per_s: float | None = None
    tokens_generated: int = 0
    tokens_recovered: int = 0
    usd_per_h: float | None = None


@dataclass(frozen=True, kw_only=True)
class WaitingResponse:
    """An unfinished response.

    Attributes:
        response: The number of the response.
        tokens: Durable tokens.
        holder: The incarnation that owns the response; None if there is none.
        released: Whether the holder has handed the response over; any member may continue a released response.
    """

    response: int
    tokens: int
    holder: str | None
    released: bool


@dataclass(frozen=True, kw_only=True)
class WaitingGroup:
    """A group with unfinished responses.

    Attributes:
        group: The number of the group.
        unfinished: The unfinished responses.
    """

    group: int
    unfinished: tuple[WaitingResponse, ...]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The totals of an iteration.

    Attributes:
        responses_planned: Responses of the plan.
        responses_done: Ended or recorded responses.
        groups_planned: Groups of the plan.
        groups_done: Groups without an unfinished response.
        groups_recorded: Groups in micro-batches.
        micro_batches: Recorded micro-batches.
        tokens: Journalled and counted tokens.
        tokens_per_s: Speed of the working members together; None without a heartbeat that tells a speed.
        claims: Claims of the iteration.
        moved: How many times a response went from one slot to another.
        reward: The mean over recorded responses; None without any.
        usd_per_h: Price of the living members, without the trainer; None if no price is known.
        to_go_s: Seconds until the last response ends, at the mean length of ended responses; None if unknown.
        acting: Responses of working members that wait for tools.
    """

    responses_planned: int = 0
    responses_done: int = 0
    groups_planned: int = 0
    groups_done: int = 0
    groups_recorded: int = 0
    micro_batches: int = 0
    tokens: int = 0
    tokens_per_s: float | None = None
    claims: int = 0
    moved: int = 0
    reward: float | None = None
    usd_per_h: float | None = None
    to_go_s: float | None = None
    acting: int = 0


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One look at a run.

    Attributes:
        run_url: The run.
        iteration: The first iteration without a report.
        phase: The phase of the iteration.
        failures: The last failures without a later success, newest first.
        silent_end: A line about the ended process of this machine that advanced the run; empty if there is none.
        phase_seen_s: For how long the watcher has seen the phase; the phase may be older.
        totals: The totals of the iteration.
        waits_for: The first groups in plan order with an unfinished response.
        groups_behind: How many more groups are unfinished.
        members: The crew.
        notice: Why the look shows an older state; empty for a present state.
    """

    run_url: str
    iteration: int
    phase: Phase
    failures: tuple[FailureRecord, ...] = ()
    silent_end: str = ""
    phase_seen_s: float = 0.0
    totals: Totals = Totals()
    waits_for: tuple[WaitingGroup, ...] = ()
    groups_behind: int = 0
    members: tuple[MemberView, ...] = ()
    notice: str = ""


class CrewView:
    """The members of an iteration: held responses from the claims, life signs from the heartbeats."""

    def __init__(
        self,
        plan: PlanRecord,
        book: ClaimBook,
        progress: Mapping[int, Progress],
        prices_usd_per_h: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """prices_usd_per_h: by pool, of a slot; a pool without one has no known price."""
        self._prices_usd_per_h = prices_usd_per_h
        self._plan = plan
        self._book = book
        self._progress = progress
        self._home = {slot.slot: unit for unit, slot in enumerate(plan.slots)}
        holdings = book.holdings()
        self._owned = {name: len(held) for name, held in holdings.items()}
        self._unfinished = {name: sum(not progress[r].done for r in held) for name, held in holdings.items()}

    def incarnations_to_show(self, heartbeats: Mapping[str, WatchedHeartbeat], silent_after_s: float) -> list[str]:
        """Return the incarnations worth showing, among all with claims or heartbeats.

        Incarnations with unfinished work are shown. Without unfinished work a planned slot shows its last incarnation,
        the owner of everything its predecessors held. Of members that joined, only living members are shown.
        """
        by_slot: dict[int, list[str]] = {}
        for name, slot in self._slots(heartbeats).items():
            by_slot.setdefault(slot, []).append(name)
        names_to_show = []
        for slot, names in by_slot.items():
            busy = [name for name in names if self._unfinished.get(name)]
            alive = [name for name in names if heartbeats.get(name, UNREAD).is_alive(silent_after_s)]
            if slot not in self._home:
                names_to_show += [name for name in names if name in busy or name in alive]
            else:
                names_to_show += busy or [name for name in names if self._owned.get(name)] or alive or names[-1:]
        return names_to_show

    def members(self, heartbeats: Mapping[str, WatchedHeartbeat], silent_after_s: float) -> tuple[MemberView, ...]:
        """Return a row per shown incarnation and per unfilled slot; slots first, then members that joined."""
        slots = self._slots(heartbeats)
        rows = [
            self._member(name, slots[name], heartbeats.get(name, UNREAD), silent_after_s)
            for name in self.incarnations_to_show(heartbeats, silent_after_s)
        ]
        for slot, unit in self._home.items():
            if slot not in slots.values() and self._plan.slots[unit].groups:
                responses = self._plan.responses_of(unit)
                free = sum(not self._progress[r].done and self._book.owner(r) is None for r in responses)
                pool = self._plan.slots[unit].pool
                rows.append(MemberView(slot=slot, joined=False, pool=pool, state="not come", unfinished=free))
        return tuple(sorted(rows, key=lambda row: (row.joined, row.slot, row.incarnation or "")))

    def waits_for(self) -> tuple[tuple[WaitingGroup, ...], int]:
        """The first groups with an unfinished response, in plan order, and how many more there are."""
        groups = self._unfinished_groups()
        first = [
            WaitingGroup(group=group, unfinished=tuple(self._waiting(r) for r in groups[group]))
            for group in sorted(groups)[:GROUPS_SHOWN]
        ]
        return tuple(first), len(groups) - len(first)

    def totals(
        self, members: Collection[MemberView], *, groups_recorded: int, micro_batches: int, reward: float | None = None
    ) -> Totals:
        """The iteration in numbers; all but the members come from the batches recorded so far."""
        rates = [m.tokens_per_s for m in members if m.state == "working" and m.tokens_per_s is not None]
        prices = [member.usd_per_h for member in members if member.usd_per_h is not None]
        return Totals(
            responses_planned=self._plan.num_responses,
            responses_done=sum(state.done for state in self._progress.values()),
            groups_planned=self._plan.num_groups,
            groups_done=self._plan.num_groups - len(self._unfinished_groups()),
            groups_recorded=groups_recorded,
            micro_batches=micro_batches,
            tokens=sum(state.tokens for state in self._progress.values()),
            tokens_per_s=sum(rates) if rates else None,
            claims=sum(self._book.epoch(unit) for unit in range(len(self._plan.slots))),
            moved=self._book.moved,
            reward=reward,
            usd_per_h=sum(prices) if prices else None,
            to_go_s=self._to_go_s(sum(rates)),
            acting=sum(member.acting for member in members if member.state == "working"),
        )

    def _to_go_s(self, tokens_per_s: float) -> float | None:
        lengths = [state.tokens for state in self._progress.values() if state.done]
        unfinished = [state.tokens for state in self._progress.values() if not state.done]
        if not lengths or not unfinished or not tokens_per_s:
            return None
        expected = sum(lengths) / len(lengths)
        # A response that is longer than the mean already still has an end to come.
        return sum(max(1.0, expected - tokens) for tokens in unfinished) / tokens_per_s

    def _usd_per_h(self, alive: HeartbeatRecord, state: MemberState) -> float | None:
        if state in ("gone", "silent") or alive.pool == TRAIN_POOL:
            return None
        if alive.usd_per_hour is not None:
            return alive.usd_per_hour
        return 0.0 if alive.pool == JOINED_POOL else self._prices_usd_per_h.get(alive.pool)

    def _unfinished_groups(self) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for response in range(self._plan.num_responses):
            if not self._progress[response].done:
                groups.setdefault(response // self._plan.num_generations, []).append(response)
        return groups

    def _waiting(self, response: int) -> WaitingResponse:
        owner, state = self._book.owner(response), self._progress[response]
        holder = owner.incarnation if owner is not None else None
        return WaitingResponse(response=response, tokens=state.tokens, holder=holder, released=state.released)

    def _slots(self, heartbeats: Mapping[str, WatchedHeartbeat]) -> dict[str, int]:
        """The slot of every incarnation, from its claims or from its heartbeat."""
        said = {name: heartbeat.record.slot for name, heartbeat in heartbeats.items() if heartbeat.record is not None}
        return self._book.incarnations | said

    def _member(self, name: str, slot: int, heartbeat: WatchedHeartbeat, silent_after_s: float) -> MemberView:
        alive, state = heartbeat.record, heartbeat.state(silent_after_s)
        joined, unfinished = slot not in self._home, self._unfinished.get(name, 0)
        if alive is None:
            return MemberView(
                slot=slot,
                joined=joined,
                incarnation=name,
                state=state,
                heartbeat_age_s=heartbeat.unchanged_s if heartbeat.seen_to_change else None,
                unfinished=unfinished,
            )
        return MemberView(
            slot=slot,
            joined=joined,
            incarnation=name,
            pool=alive.pool,
            host=alive.host,
            state=state,
            heartbeat_age_s=heartbeat.unchanged_s if heartbeat.seen_to_change else None,
            unfinished=unfinished,
            running=alive.running,
            waiting=alive.waiting,
            acting=alive.acting,
            tokens_per_s=alive.tokens_per_s,
            tokens_generated=alive.tokens_generated,
            tokens_recovered=alive.tokens_recovered,
            usd_per_h=self._usd_per_h(alive, state),
        )
