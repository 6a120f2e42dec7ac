"""The holders of an iteration's unfinished responses, and what becomes of tokens when a response changes hands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from storage.records.records import SlotPlan
from tasks.crew_model.accounts import BYTES_PER_TOKEN
from tasks.crew_model.crew_member import ModelMember
from tasks.crew_model.response_progress import Responses


@dataclass(frozen=True, kw_only=True)
class CrewRules:
    """The settings of a run by which its members work.

    Attributes:
        flush_interval_s: seconds between two flushes of a member.
        heartbeat_interval_s: seconds between two heartbeats of a member, and between two looks for work.
        claim_ttl_s: seconds of silence after which a member counts as lost.
        objective: "makespan", or "gpu_seconds": a member leaves as soon as it has no work.
        cut_share: the share of a member's responses after whose end it hands the others over and leaves; None: never.
        balance: members without work also take from living ones; lost and unclaimed responses they always take.
        resume: where a lost response begins again: at the last flush ("token"), or at its prompt ("response").
    """

    flush_interval_s: float
    heartbeat_interval_s: float
    claim_ttl_s: float
    objective: Literal["makespan", "gpu_seconds"] = "makespan"
    cut_share: float | None = None
    balance: bool = True
    resume: Literal["token", "response"] = "token"


class Ownership:
    """members: the living, and the dead and gone ones that still hold something, in the order in which they began."""

    def __init__(self, responses: Responses, slots: Sequence[SlotPlan], rules: CrewRules) -> None:
        self.responses = responses
        self.members: dict[str, ModelMember] = {}
        self.unclaimed = {slot.slot: list(responses.of_unit[slot.slot]) for slot in slots if slot.groups}
        self.moved = 0
        self._rules = rules
        self._former: dict[int, set[str]] = {}

    def claim_own(self, member: ModelMember) -> None:
        """Claim what earlier processes of the slot hold, and what is unclaimed in its unit, in the plan's order."""
        own = self.responses.of_unit.get(member.slot, ())
        mine = set(self.unclaimed.pop(member.slot, ()))
        for former in [other for other in self.members.values() if other.slot == member.slot]:
            mine.update(former.waiting)
            self._hand_out(former, tuple(former.waiting))
        self.members[member.name] = member
        ordered = [response for response in own if response in mine]
        self._hold(member, [*ordered, *sorted(mine.difference(ordered))])

    def unclaimed_from(self, place: int, count: int) -> tuple[int, ...]:
        """Up to `count` unclaimed responses, from the unit at `place` on, around all units."""
        units = list(self.unclaimed)
        found: list[int] = []
        for k in range(len(units)):
            found += self.unclaimed[units[(place + k) % len(units)]][: count - len(found)]
            if len(found) == count:
                break
        return tuple(found)

    def take_unclaimed(self, member: ModelMember, responses: Iterable[int]) -> None:
        """Give the member unclaimed responses."""
        taken = set(responses)
        for unit in {self.responses.unit[response] for response in taken}:
            rest = [response for response in self.unclaimed[unit] if response not in taken]
            if rest:
                self.unclaimed[unit] = rest
            else:
                del self.unclaimed[unit]
        self.moved += len(taken)
        self._hold(member, sorted(taken))

    def take(self, member: ModelMember, holder: ModelMember, responses: Sequence[int]) -> None:
        """Take responses from another member; a living one has journalled what it has decoded of them."""
        for response in responses:
            if response in holder.running:
                self.responses.keep(response, holder.life, holder.decoded(response))
            self._former.setdefault(response, set()).add(holder.name)
        self._hand_out(holder, responses)
        self.moved += len(responses)
        self._hold(member, responses)

    def held_before(self, member: ModelMember, response: int) -> bool:
        """Whether the member held the response earlier."""
        return member.name in self._former.get(response, ())

    def stop(self, member: ModelMember, state: str, now_s: float) -> None:
        """A process ends: "gone" if it flushed and said so, "dead" if its machine was lost.

        It keeps what it holds until another member takes it.
        """
        again = state == "dead" and self._rules.resume == "response"
        running = sorted(member.running)
        for response in running:
            kept, lost = member.flushed(response, self._rules.flush_interval_s)
            self.responses.keep(response, member.life, kept + (lost if state == "gone" else 0.0))
            self.responses.waste(member.life, 0.0 if state == "gone" else lost)
            if again:
                self.responses.begin_again(response)
        for response in sorted(member.acting.keys() | member.cached) if again else ():
            self.responses.begin_again(response)
        member.stop(state, now_s)
        if not member.unfinished:
            del self.members[member.name]

    def _hand_out(self, holder: ModelMember, responses: Sequence[int]) -> None:
        holder.drop(responses)
        if not holder.alive and not holder.unfinished:
            del self.members[holder.name]

    def _hold(self, member: ModelMember, responses: Sequence[int]) -> None:
        own = self.responses.unit
        member.waiting.extend(responses)
        member.own.update(response for response in responses if own[response] == member.slot)
        member.account.bytes_read += BYTES_PER_TOKEN * sum(self.responses.kept[response] for response in responses)
