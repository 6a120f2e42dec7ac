"""Recorded batches: an iteration's finished groups, graded, in micro-batches that are recorded before use.

The first attempt to record a micro-batch decides its content; every later attempt replays the record. If the plan wants
fewer groups than it has, groups are taken in plan order, and groups whose rewards (or values of the deciding function)
are all equal are recorded as filtered. The iteration is closed as soon as enough unfiltered groups are recorded: DAPO's
dynamic sampling (arXiv 2503.14476, section 3.2).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from resources.work_log import at_work
from storage.clock import Clock
from storage.journal.assembly import Assembled, JournalReader
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord, ClosedRecord, GradedResponse, PlanRecord, is_filtered
from storage.records.run import exists
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from tasks.grading.cases import grading_case
from tasks.grading.grader import Graded, Grader
from tasks.grading.reward import GradingCase, GradingError
from tasks.learning.journal_follower import FollowConfig, GroupFollower, RecordedElsewhereError
from tasks.learning.padding import padded_tokens
from tasks.turns.reading import ReadMessages


@dataclass(frozen=True, slots=True)
class _Notes:
    """Notes for people about the responses of a micro-batch.

    Attributes:
        errors: Failed calls of reward functions.
        given_up: Answers that a verifier gave up.
    """

    errors: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)


class BatchReader:
    """Reads recorded micro-batches and their tokens."""

    def __init__(self, store: ObjectStore, plan: PlanRecord) -> None:
        self._store = store
        self._plan = plan
        self._reader = JournalReader(store, plan)

    def read(self, number: int) -> BatchRecord:
        """A recorded micro-batch; raises ObjectMissing if it is not recorded."""
        return records.read(self._store, BatchRecord, layout.batch(self._plan.iteration, number))

    def tokens(self, graded: GradedResponse) -> Assembled:
        """The tokens of a recorded response; raises CorruptObject when the journal no longer holds them."""
        response = self._reader.follow(graded.response, graded.lineage)
        lengths = (len(response.token_ids), response.policy_length)
        if lengths != (graded.length, graded.policy_length) or not response.finish.ends_response:
            reason = f"response {graded.response} has {len(response.token_ids)} tokens left of {graded.length}"
            raise CorruptObject(layout.journal(self._plan.iteration), reason)
        return response


class Batches(BatchReader):
    """An iteration's micro-batches in order. A micro-batch is recorded, by any process, before it is yielded."""

    def __init__(self, store: ObjectStore, plan: PlanRecord) -> None:
        super().__init__(store, plan)
        self._pending = list(range(plan.num_groups))
        self._groups_trained = 0

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for a group to end, or for another process to record it."""
        raise NotImplementedError

    @property
    def share_recorded(self) -> float:
        """The share of groups in the batches yielded so far; 1 as soon as the batches have enough groups."""
        groups = self._plan.num_groups
        return 1.0 if self._is_complete else (groups - len(self._pending)) / groups

    def __iter__(self) -> Iterator[BatchRecord]:
        """Yield micro-batches until the batches have enough groups."""
        number = 0
        while not self._is_complete:
            batch = self._batch(number)
            groups = self._groups(batch.graded)
            self._pending = [group for group in self._pending if group not in groups]
            self._groups_trained += len(self._groups(batch.responses))
            number += 1
            if self._is_complete:
                self._complete()
            yield batch
            self._release(groups)

    @property
    def _is_complete(self) -> bool:
        wanted = self._plan.groups_wanted
        return not self._pending or (wanted is not None and self._groups_trained >= wanted)

    def _groups(self, responses: Sequence[GradedResponse]) -> set[int]:
        return {graded.response // self._plan.num_generations for graded in responses}

    def _batch(self, number: int) -> BatchRecord:
        """Return micro-batch `number`; waits until the micro-batch is recorded."""
        raise NotImplementedError

    def _complete(self) -> None:
        """Called before the last micro-batch is yielded."""

    def _release(self, groups: Collection[int]) -> None:
        """Called when a micro-batch of these groups was used."""


class FollowedBatches(Batches):
    """Yields micro-batches as a collector records them."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        clock: Clock,
        poll_interval_s: float,
        waits: Callable[[bool], None],
    ) -> None:
        """Follow the records of a collector.

        Args:
            store: The run's store.
            plan: The iteration's plan.
            clock: The clock of all waits.
            poll_interval_s: Seconds between two looks for the next micro-batch.
            waits: Called with True before each pause, and with False when a micro-batch was found; may raise.
        """
        super().__init__(store, plan)
        self._clock = clock
        self._poll_interval_s = poll_interval_s
        self._waits = waits
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        return self._waited_s

    def _batch(self, number: int) -> BatchRecord:
        began_s = self._clock.monotonic()
        while True:
            with suppress(ObjectMissing):
                batch = self.read(number)
                self._waits(False)
                self._waited_s += self._clock.monotonic() - began_s
                return batch
            self._waits(True)
            at_work("waiting for groups to be recorded", lambda: f"{number:,} micro-batches read")
            self._clock.sleep(self._poll_interval_s)


class RecordedBatches(Batches):
    """Follows an iteration's journal, and grades and records finished groups in micro-batches."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        *,
        prompts: Sequence[PromptRow],
        grader: Grader | None,
        decode: Callable[[Sequence[int]], str],
        read_messages: ReadMessages | None = None,
        follow: FollowConfig,
        tokens_max: int,
        clock: Clock,
        watch: Callable[[bool], None] = lambda _: None,
        before_closing: Callable[[], None] = lambda: None,
    ) -> None:
        """Follow an iteration.

        Args:
            store: The run's store.
            plan: The iteration's plan.
            prompts: The iteration's prompts, by group.
            grader: The run's reward functions; None without rewards, where the reward is 0.
            decode: Makes the text of a response from token ids.
            read_messages: Reads the messages of a response in a run with turns; None without turns.
            follow: How the journal is followed.
            tokens_max: The most tokens of a micro-batch, padding included.
            clock: The clock of all waits.
            watch: As in `GroupFollower`.
            before_closing: Called after the last record, before the iteration is closed.
        """
        super().__init__(store, plan)
        self._before_closing = before_closing
        self._prompts = prompts
        self._grader = grader
        self._decode = decode
        self._read_messages = read_messages
        self._in_order = follow.in_plan_order
        self._tokens_max = tokens_max
        self._follower = GroupFollower(self._reader, plan, follow, clock, watch)

    @property
    def waited_s(self) -> float:
        return self._follower.waited_s

    def _complete(self) -> None:
        self._before_closing()
        what = "as many groups as are wanted are" if self._pending else "every response is"
        closed = ClosedRecord(iteration=self._plan.iteration, reason=f"{what} in a recorded batch")
        records.commit(self._store, layout.closed(self._plan.iteration), closed)

    def _release(self, groups: Collection[int]) -> None:
        for group in groups:
            self._follower.release(group)

    def _batch(self, number: int) -> BatchRecord:
        """Return the recorded micro-batch, or record a new micro-batch; a record of another attempt wins."""
        key = layout.batch(self._plan.iteration, number)
        with suppress(ObjectMissing):
            return records.read(self._store, BatchRecord, key)
        at_work(
            "recording groups as they end", lambda: f"{number:,} micro-batches recorded; {self._follower.in_words()}"
        )
        with suppress(RecordedElsewhereError):
            batch = self._new_batch(number, lambda: exists(self._store, key))
            if records.commit(self._store, key, batch):
                return batch
        return records.read(self._store, BatchRecord, key)

    def _new_batch(self, number: int, recorded: Callable[[], bool]) -> BatchRecord:
        notes = _Notes()
        filtered: list[GradedResponse] = []
        if self._plan.groups_wanted is None:
            responses = self._grade(self._gather(recorded), notes)
        else:
            missing = self._plan.groups_wanted - self._groups_trained
            responses, filtered = self._gather_graded(missing, recorded, notes)
        return BatchRecord(
            iteration=self._plan.iteration,
            number=number,
            responses=tuple(responses),
            filtered=tuple(filtered),
            reward_errors=tuple(notes.errors),
            given_up=tuple(notes.given_up),
        )

    def _grade(self, groups: Sequence[int], notes: _Notes) -> list[GradedResponse]:
        """Grade the responses of finished groups, in order; failed calls and answers given up are added to `notes`.

        Responses that failed are recorded without a grade.
        """
        responses = [response for group in groups for response in self._follower.responses_in(group)]
        finished = [self._follower.response(response) for response in responses]
        if self._grader is None:
            failed = [response.finish is Finish.FAILED for response in finished]
            outcomes = [
                None if lost else Graded(each.response, 0.0, {}, {})
                for each, lost in zip(finished, failed, strict=True)
            ]
            return list(map(_graded, finished, outcomes))
        cases = [self._case(response) for response in finished if response.finish is not Finish.FAILED]
        graded = {outcome.response: outcome for outcome in self._grader.grade(cases)}
        notes.errors.extend(error for outcome in graded.values() for error in outcome.errors.values())
        notes.given_up.extend(why for outcome in graded.values() for why in outcome.given_up.values())
        return [_graded(response, graded.get(response.response)) for response in finished]

    def _gather(self, recorded: Callable[[], bool]) -> list[int]:
        """Wait for finished groups until the next group would exceed a micro-batch, and return the groups.

        In plan order, the division depends on lengths alone and not on the rollout's timing: the method waits even for
        the group that no longer fits. In order of arrival, the method waits only for the first group.
        """
        groups: list[int] = []
        lengths: list[int] = []
        pending = list(self._pending)
        while pending:
            if groups and not self._in_order and not any(self._follower.is_finished(group) for group in pending):
                break
            group = self._follower.wait(pending, recorded)
            extended = [*lengths, *self._lengths(group)]
            if groups and padded_tokens(extended) > self._tokens_max:
                break
            groups.append(group)
            pending.remove(group)
            lengths = extended
        return groups

    def _gather_graded(
        self, missing: int, recorded: Callable[[], bool], notes: _Notes
    ) -> tuple[list[GradedResponse], list[GradedResponse]]:
        """Wait for groups in plan order and grade them; return the trained and the filtered responses of a micro-batch.

        At most `missing` groups are trained. The division depends on lengths and rewards alone. A group that does not
        fit is graded with the next micro-batch, so every group is graded once. Filtered groups take no room.
        """
        kept: list[GradedResponse] = []
        filtered: list[GradedResponse] = []
        lengths: list[int] = []
        for index in range(len(self._pending)):
            group = self._follower.wait(self._pending[index:], recorded)
            extended = [*lengths, *self._lengths(group)]
            if kept and padded_tokens(extended) > self._tokens_max:
                break
            graded = self._grade([group], notes)
            if is_filtered(self._plan, graded):
                filtered += graded
                continue
            kept += graded
            lengths = extended
            missing -= 1
            if not missing:
                break
        return kept, filtered

    def _lengths(self, group: int) -> list[int]:
        """The number of tokens of prompt and response, for each response of a finished group."""
        prompt = len(self._prompts[group].token_ids)
        return [prompt + len(self._follower.response(r).token_ids) for r in self._follower.responses_in(group)]

    def _case(self, response: Assembled) -> GradingCase:
        prompt = self._prompts[response.response // self._plan.num_generations]
        return grading_case(response, prompt, self._decode, self._read_messages)


def _graded(response: Assembled, outcome: Graded | None) -> GradedResponse:
    """The record of a response; outcome None stands for a failed response."""
    ended: Literal["stop", "length"] = "stop" if response.finish == Finish.STOP else "length"
    return GradedResponse(
        response=response.response,
        length=len(response.token_ids),
        policy_length=response.policy_length,
        finish_reason="failed" if outcome is None else ended,
        lineage=response.lineage,
        reward=None if outcome is None else outcome.reward,
        rewards={} if outcome is None else outcome.values,
    )


def check_some_graded(plan: PlanRecord, graded: Collection[GradedResponse]) -> None:
    """Raise GradingError if no response of an iteration is graded: such environments teach nothing."""
    if not graded:
        raise GradingError(
            f"iteration {plan.iteration}: every response failed, because its environment was lost; allowed: some. The "
            "events in the journal say why"
        )
