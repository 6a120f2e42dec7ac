"""The trainer's wait for the scorers of `teacher.pool`, which score responses as groups end."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from storage.clock import Clock
from storage.journal.assembly import Assembled
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
from tasks.learning.score_journal import ScoreJournal, identity

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
        tokens = self._tokens(responses)
        what = f"scores of pool {self._teacher.pool!r}"
        waiting = Wait(what, self._clock, self._timeout_s, "then training stops (trainer.group_timeout_s)")
        began_s, seen = self._clock.monotonic(), self._journal.progress
        found: dict[int, ScoredResponse] = {}
        while True:
            self._look(tokens, teachers, found)
            if len(found) == len(responses):
                self.waited_s += self._clock.monotonic() - began_s
                return [found[graded.response] for graded in responses]
            missing = [graded.response for graded in responses if graded.response not in found]
            if self._journal.progress != seen:
                seen = self._journal.progress
                waiting.saw_life()
            if waiting.is_over:
                raise GroupTimeout(self._described(missing, tokens))
            waiting.what = f"{what}: {self._shown(missing, tokens)}"
            waiting.pause(POLL_INTERVAL_S)

    def at_hand(self, responses: Sequence[GradedResponse], teachers: Sequence[str]) -> list[ScoredResponse] | None:
        """The scores that the scorers have left, as in a call, but without a wait; None if one of them is missing."""
        found: dict[int, ScoredResponse] = {}
        self._look(self._tokens(responses), teachers, found)
        return [found[graded.response] for graded in responses] if len(found) == len(responses) else None

    def _tokens(self, responses: Sequence[GradedResponse]) -> dict[int, Assembled]:
        return {each.response: self._reader.tokens(each) for each in responses}

    def _look(self, tokens: Mapping[int, Assembled], teachers: Sequence[str], found: dict[int, ScoredResponse]) -> None:
        """Add the scores that are complete by now to `found`."""
        self._journal.refresh()
        for (response, its_tokens), teacher in zip(tokens.items(), teachers, strict=True):
            if response not in found:
                scored = self._journal.scored(response, teacher, its_tokens)
                found |= {} if scored is None else {response: scored}

    def _described(self, missing: Sequence[int], tokens: Mapping[int, Assembled]) -> str:
        failed = read_hint(self._store, FailureRecord, layout.failure("score"))
        why = "" if failed is None else f"; a scorer of iteration {failed.iteration} failed: {failed.error}"
        return (
            f"iteration {self._plan.iteration}: no scorer of pool {self._teacher.pool!r} (teacher.pool) has written "
            f"anything for {self._timeout_s:.0f} s (trainer.group_timeout_s); "
            f"waiting for {self._shown(missing, tokens)}{why}"
        )

    def _shown(self, missing: Sequence[int], tokens: Mapping[int, Assembled]) -> str:
        """The responses that lack scores, with tokens scored and scorer."""
        parts = []
        for response in missing[:RESPONSES_SHOWN]:
            owner = self._journal.reader.book.owner(response)
            by = "not claimed" if owner is None else f"by {owner.incarnation}"
            place = self._journal.place(response, identity(tokens[response]), is_recorded=True)
            scored = 0 if place is None else place.num_scored
            is_again = place is not None and place.number != response
            again = " again, because the first scores are of tokens that do not count" if is_again else ""
            parts.append(f"response {response} ({scored} tokens scored{again}, {by})")
        if len(missing) > RESPONSES_SHOWN:
            parts.append(f"and {len(missing) - RESPONSES_SHOWN} more")
        return ", ".join(parts)
