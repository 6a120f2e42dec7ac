"""The groups of an iteration that can be scored: recorded in a micro-batch, or ended as claims say now.

A claim may void an end that was read: claim and end may race. What a micro-batch records stays for ever.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from storage.journal.assembly import Assembled
from storage.journal.shard import Finish
from storage.records.records import GradedResponse, PlanRecord
from storage.stores.store import ObjectMissing, ObjectStore
from tasks.configuration.rollout import RolloutConfig
from tasks.learning.arrivals import ArrivingShards
from tasks.learning.recorded_batches import BatchReader
from tasks.learning.score_journal import identity


@dataclass(frozen=True)
class EndedGroup:
    """A group as a scorer takes it.

    Attributes:
        responses: What a teacher scores, in the order of a micro-batch; empty if nothing is trained.
        identities: Of each response by number, as `score_journal.identity` says.
        is_recorded: Whether a micro-batch has the group, so that no claim changes it any more.
    """

    responses: list[GradedResponse]
    identities: dict[int, bytes]
    is_recorded: bool


class EndedGroups(BatchReader):
    """The groups of an iteration whose responses have all ended, with their tokens."""

    def __init__(self, store: ObjectStore, plan: PlanRecord, rollout: RolloutConfig) -> None:
        """rollout: its intervals say when shards come."""
        super().__init__(store, plan)
        self._arriving = ArrivingShards(self._reader, rollout.flush_interval_s, rollout.poll_interval_s)
        self._num_batches = 0
        self._recorded: dict[int, EndedGroup] = {}
        # With the claims by which each of them has ended.
        self._ended: dict[int, tuple[Hashable, EndedGroup]] = {}

    def look(self, now_s: float) -> None:
        """Read what is new of groups that have not ended, and new micro-batches. now_s: on the monotonic clock."""
        self._arriving.look(self._unended, now_s)
        while True:
            try:
                batch = self.read(self._num_batches)
            except ObjectMissing:
                return
            self._num_batches += 1
            for group in {graded.response // self._plan.num_generations for graded in batch.graded}:
                own = [each for each in batch.responses if each.response // self._plan.num_generations == group]
                trained = [each for each in own if each.finish_reason != "failed"]
                identities = {each.response: identity(self.tokens(each)) for each in trained}
                self._recorded[group] = EndedGroup(trained, identities, is_recorded=True)

    def _unended(self) -> list[int]:
        size = self._plan.num_generations
        groups = (group for group in range(self._plan.num_groups) if group not in self._recorded)
        numbers = (number for group in groups for number in range(group * size, (group + 1) * size))
        return [number for number in numbers if not self._reader.has_ended(number)]

    @property
    def progress(self) -> int:
        """A number that grows with every claim, every shard and every micro-batch that was read."""
        return self._reader.progress + self._num_batches

    @property
    def recorded(self) -> set[int]:
        """The groups that a micro-batch has."""
        return set(self._recorded)

    def named(self, group: int) -> EndedGroup | None:
        """The group as far as was read; None while a response of it has not ended."""
        if group in self._recorded:
            return self._recorded[group]
        size = self._plan.num_generations
        numbers = range(group * size, (group + 1) * size)
        if not all(map(self._reader.has_ended, numbers)):
            return None
        book = self._reader.book
        claims = tuple((book.owner(number), book.sealed(number)) for number in numbers)
        if group not in self._ended or self._ended[group][0] != claims:
            found = [each for each in map(self._reader.assemble, numbers) if each.finish is not Finish.FAILED]
            identities = {each.response: identity(each) for each in found}
            self._ended[group] = claims, EndedGroup(list(map(_ungraded, found)), identities, is_recorded=False)
        return self._ended[group][1]


def _ungraded(response: Assembled) -> GradedResponse:
    """The response with a reward of 0, which no scorer reads."""
    return GradedResponse(
        response=response.response,
        length=len(response.token_ids),
        policy_length=response.policy_length,
        finish_reason="stop" if response.finish is Finish.STOP else "length",
        lineage=response.lineage,
        reward=0.0,
        rewards={},
    )
