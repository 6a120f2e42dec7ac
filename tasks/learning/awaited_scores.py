"""The trainer's wait for the scorers of `teacher.pool`, which score responses as groups end."""

from collections.abc import Sequence
from functools import cached_property

from storage.clock import Clock
from storage.records import layout
from storage.records.failures import FailureRecord
from storage.records.hints import read_hint
from storage.records.records import GradedResponse, PlanRecord
from storage.records.run import read_run
from storage.records.teacher_scores import ScoredResponse
from storage.stores.store import ObjectStore
from storage.waiting import Wait
from tasks.configuration.teacher import TeacherConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.journal_follower import GroupTimeout
from tasks.learning.recorded_batches import BatchReader
from tasks.learning.score_journal import ScoreJournal, policy_tokens

POLL_INTERVAL_S = 1.0
RESPONSES_SHOWN = 5


class AwaitedScores:
    """The scores of an iteration's responses as scorers journal them, on the first rank.

    Attributes:
        waited_s: Seconds of waiting so far.
    """

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        reader: BatchReader,
        teacher: TeacherConfig,
        trainer: TrainerConfig,
        clock: Clock,
    ) -> None:
        """teacher: pool and top_k are used. trainer: group_timeout_s limits the time without anything new."""
        self._store = store
        self._plan = plan
        self._reader = reader
        self._teacher = teacher
        self._timeout_s = trainer.group_timeout_s
        self._clock = clock
        self.waited_s = 0.0

    @cached_property
    def _journal(self) -> ScoreJournal:
        # A replay reads none.
        return ScoreJournal(self._store, self._plan, self._teacher.head_size(read_run(self._store).vocab_size))

    def __call__(self, responses: Sequence[GradedResponse], teachers: Sequence[str]) -> list[ScoredResponse]:
        """Wait for the scores of recorded responses, and return them in order. teachers: by response.

        Raises GroupTimeout when nothing new was journalled for the time limit, and CorruptObject.
        """
        what = f"scores of pool {self._teacher.pool!r}"
        waiting = Wait(what, self._clock, self._timeout_s, "then training stops (trainer.group_timeout_s)")
        began_s, seen = self._clock.monotonic(), self._journal.progress
        sampled = {each.response: policy_tokens(self._reader.tokens(each)) for each in responses}
        found: dict[int, ScoredResponse] = {}
        while True:
            self._journal.refresh()
            for graded, teacher in zip(responses, teachers, strict=True):
                if graded.response not in found:
                    scored = self._journal.scored(graded.response, teacher, sampled[graded.response])
                    found |= {} if scored is None else {graded.response: scored}
            if len(found) == len(responses):
                self.waited_s += self._clock.monotonic() - began_s
                return [found[graded.response] for graded in responses]
            missing = [graded.response for graded in responses if graded.response not in found]
            if self._journal.progress != seen:
                seen = self._journal.progress
                waiting.saw_life()
            if waiting.is_over:
                raise GroupTimeout(self._described(missing))
            waiting.what = f"{what}: {self._shown(missing)}"
            waiting.pause(POLL_INTERVAL_S)

    def _described(self, missing: Sequence[int]) -> str:
        failed = read_hint(self._store, FailureRecord, layout.failure("score"))
        why = "" if failed is None else f"; a scorer of iteration {failed.iteration} failed: {failed.error}"
        return (
            f"iteration {self._plan.iteration}: no scorer of pool {self._teacher.pool!r} (teacher.pool) has written "
            f"anything for {self._timeout_s:.0f} s (trainer.group_timeout_s); waiting for {self._shown(missing)}{why}"
        )

    def _shown(self, missing: Sequence[int]) -> str:
        """The responses that lack scores, with tokens scored and scorer."""
        parts = []
        for response in missing[:RESPONSES_SHOWN]:
            owner = self._journal.reader.book.owner(response)
            by = "not claimed" if owner is None else f"by {owner.incarnation}"
            parts.append(f"response {response} ({self._journal.num_scored(response)} tokens scored, {by})")
        if len(missing) > RESPONSES_SHOWN:
            parts.append(f"and {len(missing) - RESPONSES_SHOWN} more")
        return ", ".join(parts)
