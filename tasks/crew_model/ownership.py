"""The holders of an iteration's unfinished responses, and the fate of tokens when a response changes hands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from storage.records.records import SlotPlan
from tasks.crew_model.accounts import BYTES_PER_TOKEN
from tasks.crew_model.crew_member import ModelMember
from tasks.crew_model.response_progress import Responses


@dataclass(frozen=True, kw_only=True)
class CrewRules:
    """The settings of a run that members follow.

    Attributes:
        flush_interval_s: Seconds between two flushes of a member.
        heartbeat_interval_s: Seconds between two heartbeats of a member, and between two looks for work.
        claim_ttl_s: Seconds of silence after which a member counts as lost.
        objective: "makespan", or "gpu_seconds": a member leaves as soon as no work is left to take.
        cut_share: The ended share of a member's responses from which the member hands the rest over and leaves; None:
            never.
        balance: Members without work also take from living members. Lost and unclaimed responses are always taken.
        resume: The restart of a lost response: at the last flush ("token"), or at the prompt ("response").
    """

    flush_interval_s: float
    heartbeat_interval_s: float
    claim_ttl_s: float
    objective: Literal["makespan", "gpu_seconds"] = "makespan"
    cut_share: float | None = None
    balance: bool = True
    resume: Literal["token", "response"] = "token"


class Ownership:
    """The holders of the unfinished responses.

    Attributes:
        responses: The responses of the iteration.
        members: Living members, and dead or gone members that still hold responses, by name, in order of beginning.
        unclaimed: Unclaimed responses by unit.
        moved: The number of responses taken unclaimed, or handed to a new holder by `take`.
    """

    def __init__(self, responses: Responses, slots: Sequence[SlotPlan], rules: CrewRules) -> None:
        self.responses = responses
        self.members: dict[str, ModelMember] = {}
        self.unclaimed = {slot.slot: list(responses.of_unit[slot.slot]) for slot in slots if slot.groups}
        self.moved = 0
        self._rules = rules
        self._former: dict[int, set[str]] = {}

    def claim_own(self, member: ModelMember) -> None:
        """Claim the responses of earlier processes of the slot, and the slot's unclaimed unit, in the plan's order."""
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
        """Take responses from their holder; a living holder has journalled its decoded tokens of the responses."""
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
        """End a process: "gone" after a flush with notice, "dead" after the loss of the machine.

        The ended member keeps its responses until new holders take them.
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
        member.account.bytes_read += BYTES_PER_TOKEN * sum(
            self.responses.journalled_tokens[response] for response in responses
        )
