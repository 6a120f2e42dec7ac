"""The crew of one iteration: members claim, decode, look for work, are lost and hand over, by production's rules.

Four points are simpler than in a session. A member always sees the present state of its peers. The end of a response or
turn, and the answer of a tool, count at once instead of at the next flush. A holder answers every ask within an
interval. A tool call that is open when its member stops is called again by the next holder, and takes as long again.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence

from storage.records.records import TRAIN_POOL, SlotPlan
from tasks.crew_model.accounts import Account
from tasks.crew_model.crew_member import EngineModel, ModelMember
from tasks.crew_model.events import Events
from tasks.crew_model.ownership import CrewRules, Ownership
from tasks.crew_model.rebalance import LOOKS_MAX, should_cut
from tasks.crew_model.response_progress import Responses
from tasks.crew_model.work_search import WorkSearch


class CrewModel:
    """All members of an iteration, including members on the trainer's machines.

    Args:
        events: Virtual time.
        responses: The responses of the iteration.
        slots: The slots of the plan.
        rules: The settings of the run.
        prompt_tokens: Tokens of a prompt.
        rng: Decides the order of looks, and the members and units looked at.
        observation_tokens: Tokens of a tool's answer.
        on_group: Called with the number of every complete group.
        on_end: Called when all responses have ended.
        on_leave: Called when a member leaves before the end of the iteration.
        on_members: Called when a member outside the trainer's machines has claimed, or has ended.
        on_held: Called when a member without weights holds responses after a look.
        enough: Whether a member without responses should work elsewhere; None: members never do.
    """

    def __init__(
        self,
        events: Events,
        responses: Responses,
        slots: Sequence[SlotPlan],
        rules: CrewRules,
        prompt_tokens: int,
        rng: random.Random,
        *,
        observation_tokens: int = 0,
        on_group: Callable[[int], None],
        on_end: Callable[[], None],
        on_leave: Callable[[ModelMember], None],
        on_members: Callable[[], None],
        on_held: Callable[[ModelMember], None] = lambda member: None,  # noqa: ARG005
        enough: Callable[[ModelMember], bool] | None = None,
    ) -> None:
        self._events = events
        self._responses = responses
        self._slots = {slot.slot: slot for slot in slots}
        self._rules = rules
        self._prompt_tokens, self._observation_tokens = prompt_tokens, observation_tokens
        self._rng = rng
        self._on_group, self._on_end, self._on_leave = on_group, on_end, on_leave
        self._on_members = on_members
        self._on_held, self._enough = on_held, enough
        self._ownership = Ownership(responses, slots, rules)
        self._leaves_early = rules.objective == "gpu_seconds"
        self._incarnations = 0
        self._ticking = False
        # The time of a fruitless round of looks: without a change every further round is fruitless, too.
        self._quiet_from_s: float | None = None
        self._alive = 0
        self._alone_from_s = events.now_s
        self.ended_s: float | None = None
        # The end of the last ended response or turn; at first the beginning.
        self.progress_s = events.now_s

    @property
    def moved(self) -> int:
        """How many times a response was handed to a different member, or an unclaimed response was taken."""
        return self._ownership.moved

    @property
    def working(self) -> int:
        """The number of living members with weights outside the trainer's machines."""
        return sum(m.state == "working" and m.account.pool != TRAIN_POOL for m in self._ownership.members.values())

    @property
    def alone_from_s(self) -> float | None:
        """The time from which no member outside the trainer's machines lives; None while a member lives.

        The time may lie in the future, because a dead member counts as living until `claim_ttl_s` of silence.
        """
        return None if self._alive else self._alone_from_s

    @property
    def slot_beyond(self) -> int:
        """The first slot number beyond the plan's slots."""
        return max(self._slots, default=-1) + 1

    def begin(self, slot: int, engine: EngineModel, account: Account, weight: float = 1.0) -> ModelMember:
        """A process of the slot begins and claims; weight: the process's share of a machine.

        A slot outside the plan has no groups: its member takes work by looking only.
        """
        self._incarnations += 1
        planned = self._slots.get(slot)
        member = ModelMember(
            f"{slot}-{self._incarnations}",
            slot,
            engine,
            account,
            now_s=self._events.now_s,
            batch_max=None if planned is None else planned.batch_max,
            weight=weight,
            phase_s=self._rng.uniform(0, self._rules.flush_interval_s),
        )
        self._end_quiet()
        self._ownership.claim_own(member)
        self._tick()
        # Groups of members that have not begun are unclaimed, and free for a member with room.
        self._events.after(0.0, lambda: self._first_look(member))
        if account.pool != TRAIN_POOL:
            self._alive += 1
            self._on_members()
        return member

    def work(self, member: ModelMember) -> None:
        """The weights are in place: the member begins to decode."""
        self._end_quiet()
        member.work(self._events.now_s)
        if self.ended_s is None:
            self._go_on(member)

    def stop(self, member: ModelMember, *, notice: bool) -> None:
        """End the member's process. With notice the member flushes, and peers may claim its responses at once."""
        self._end_quiet()
        member.advance(self._events.now_s)
        self._ownership.stop(member, "gone" if notice else "dead", self._events.now_s)
        if member.account.pool != TRAIN_POOL:
            self._alive -= 1
            silent_s = self._events.now_s + (0.0 if notice else self._rules.claim_ttl_s)
            self._alone_from_s = max(self._alone_from_s, silent_s)
            self._on_members()

    def settle(self) -> None:
        """Advance every member to the present time."""
        self._end_quiet()
        for member in self._ownership.members.values():
            member.advance(self._events.now_s)

    def _first_look(self, member: ModelMember) -> None:
        # A member of a standing crew looks with its first heartbeat, when its process knows of it.
        if self._enough is None and member.alive and member.room and self.ended_s is None:
            self._end_quiet()
            self._look(member, self._search())
            self._note_next_end(member)

    def _go_on(self, member: ModelMember) -> None:
        """Begin waiting responses up to the batch limit, look for work if none are left, and note the next end."""
        self._fill(member)
        if not member.unfinished:
            self._look(member, self._search())
        self._note_next_end(member)

    def _fill(self, member: ModelMember) -> None:
        member.advance(self._events.now_s)
        responses = self._responses
        if responses.owed and member.state == "working":
            self._ask_again(member)
        while member.state == "working" and member.waiting and len(member.running) < member.batch_limit:
            response = member.waiting.popleft()
            kept, observed = (
                responses.journalled_tokens[response],
                self._observation_tokens * responses.answered(response),
            )
            prefix = self._observation_tokens if response in member.cached else kept + observed
            left, group = responses.turn_end(response) - kept, responses.group(response)
            member.start(response, left, group, self._prompt_tokens, prefix)

    def _ask_again(self, member: ModelMember) -> None:
        """Call again the tools of waiting responses whose former members stopped before the answer."""
        owed = [response for response in member.waiting if response in self._responses.owed]
        if owed:
            member.waiting = deque(response for response in member.waiting if response not in self._responses.owed)
        for response in owed:
            self._ask(member, response)

    def _ask(self, member: ModelMember, response: int) -> None:
        """Let a response wait for the answer of its tool."""
        answer = self._responses.next_answer(response)
        if answer is None:
            raise RuntimeError(f"response {response} is owed an answer that it does not have")
        due_s = self._events.now_s + answer.wait_s
        member.wait_for_answer(response, due_s)
        self._events.at(due_s, lambda: self._answered(member, response, due_s))

    def _answered(self, member: ModelMember, response: int, due_s: float) -> None:
        if member.acting.get(response) != due_s:
            return
        self._end_quiet()
        member.advance(self._events.now_s)
        self._responses.answer(response)
        member.answered(response)
        self._fill(member)
        self._note_next_end(member)

    def _note_next_end(self, member: ModelMember) -> None:
        member.version += 1
        version, next_s = member.version, member.next_end_s()
        if next_s is not None:
            self._events.at(next_s, lambda: self._decoded(member, version))

    def _decoded(self, member: ModelMember, version: int) -> None:
        if version != member.version:
            return
        self._end_quiet()
        member.advance(self._events.now_s)
        self.progress_s = self._events.now_s
        for response in member.ended():
            if self._responses.next_answer(response) is not None:
                self._responses.end_turn(response, member.life)
                member.cached.add(response)
                self._ask(member, response)
                continue
            member.own.discard(response)
            if self._responses.end(response, member.life):
                self._on_group(self._responses.group(response))
        if self._responses.left:
            self._go_on(member)
        else:
            self.ended_s = self._events.now_s
            self._on_end()

    def _search(self) -> WorkSearch:
        return WorkSearch(
            self._ownership,
            self._rng,
            now_s=self._events.now_s,
            claim_ttl_s=self._rules.claim_ttl_s,
            free_only=not self._rules.balance or self._leaves_early,
            ask=self._ask_holder,
        )

    def _ask_holder(self, member: ModelMember, holder: ModelMember, responses: tuple[int, ...]) -> None:
        """A member asks for responses, which the holder journals and gives up before the member's next look."""
        answer_s = min(self._rules.flush_interval_s, self._rules.heartbeat_interval_s)
        self._events.after(answer_s, lambda: self._give(member, holder, responses))

    def _give(self, member: ModelMember, holder: ModelMember, responses: tuple[int, ...]) -> None:
        member.open_asks.pop(holder.name, None)
        if not (member.alive and holder.state == "working" and self.ended_s is None):
            return
        self._end_quiet()
        holder.advance(self._events.now_s)
        held = holder.running.keys() | set(holder.waiting)
        given = [response for response in responses if response in held]
        if not given:
            return
        self._ownership.take(member, holder, given)
        for each in (member, holder):
            self._fill(each)
            self._note_next_end(each)

    def _look(self, member: ModelMember, search: WorkSearch) -> bool:
        """Look for work once; a member without work that may leave, leaves. Returns whether anything changed."""
        givers = search.seek(member)
        found = bool(givers or member.waiting)
        if found:
            self._fill(member)
        for name in givers:
            giver = self._ownership.members.get(name)
            if giver is not None and giver.state == "working":
                self._fill(giver)
                self._note_next_end(giver)
        if member.state == "loading" and member.waiting:
            self._on_held(member)
        goes_on = member.alive and not member.unfinished and member.account.pool != TRAIN_POOL
        elsewhere = goes_on and self._enough is not None and self._enough(member)
        if (self._leaves_early and self._may_leave(member)) or elsewhere:
            self._on_leave(member)
            return True
        return found

    def _may_leave(self, member: ModelMember) -> bool:
        """Whether the member holds no work, its unit has ended, and neither peers' nor free work is left to take."""
        held = member.unfinished or member.account.pool == TRAIN_POOL or member.state != "working"
        others = self._ownership.members.values()
        free = self._ownership.unclaimed or not all(other.alive for other in others)
        handed_on = any(other.account.pool == TRAIN_POOL and other.unfinished for other in others)
        return not (held or free or handed_on or self._responses.unit_left[member.slot])

    def _tick(self) -> None:
        if not self._ticking:
            self._ticking = True
            self._events.after(self._rules.heartbeat_interval_s, self._round)

    def _end_quiet(self) -> None:
        """Resume the rounds of looks at the next heartbeat, because of a change; count the looks left out."""
        if self._quiet_from_s is None:
            return
        interval_s = self._rules.heartbeat_interval_s
        left_out = math.floor((self._events.now_s - self._quiet_from_s) / interval_s)
        members = self._ownership.members
        for member in members.values():
            if member.room:
                member.life.looks += left_out * min(LOOKS_MAX, len(members) - 1)
        self._ticking = True
        self._events.at(self._quiet_from_s + (left_out + 1) * interval_s, self._round)
        self._quiet_from_s = None

    def _round(self) -> None:
        """Let each member with room look for work, at every heartbeat of the crew, in a random order."""
        self._ticking = False
        alive = [member for member in self._ownership.members.values() if member.alive]
        if self.ended_s is not None or not alive:
            return
        self._rng.shuffle(alive)
        self._cut(alive)
        search, found = self._search(), False
        for member in alive:
            if member.alive and member.room:
                found |= self._look(member, search)
                if member.alive:
                    self._note_next_end(member)
        members = self._ownership.members.values()
        # A dead member counts as lost only later, and of many members a look sees only some.
        silent_s = self._events.now_s - self._rules.claim_ttl_s
        silent = any(member.state == "dead" and member.ended_s >= silent_s for member in members)
        if found or silent or self._enough is not None or len(members) > LOOKS_MAX:
            self._tick()
        else:
            self._quiet_from_s = self._events.now_s

    def _cut(self, alive: Sequence[ModelMember]) -> None:
        """Let each member leave that has ended most of its responses, if its peers have room for the rest."""
        share = self._rules.cut_share
        crew = [member for member in alive if member.state == "working" and member.account.pool != TRAIN_POOL]
        for member in crew if share is not None else ():
            member.advance(self._events.now_s)
            total = len(self._responses.of_unit[member.slot])
            ended = total - self._responses.unit_left[member.slot]
            # As in production: no two members leave their work to each other, and no member leaves it to the trainer's
            # machine.
            mine = (member.unfinished, member.name)
            rooms = [m.room for m in crew if m.state == "working" and (m.unfinished, m.name) > mine]
            if not member.acting and should_cut(ended, total, member.unfinished, rooms, share):
                self._on_leave(member)
