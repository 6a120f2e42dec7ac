"""Following the journal: which groups are finished, and which responses are missing when none finishes in time.

It works the same while rollouts run and after they have ended.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from storage.assembly import Assembled, JournalReader
from storage.clock import Clock
from storage.records import PlanRecord
from tasks.configuration.run_config import RunConfig

log = logging.getLogger(__name__)
RESPONSES_SHOWN = 6
LOG_INTERVAL_S = 30.0


class GroupTimeout(TimeoutError):  # noqa: N818 - reads as what happened
    """No token came for group_timeout_s while a group was unfinished; names the responses and who holds them."""


class RecordedElsewhereError(Exception):
    """Another attempt has recorded the micro-batch for which this one waits, so there is nothing to wait for."""


@dataclass(frozen=True, kw_only=True)
class FollowConfig:
    """in_plan_order: whether to wait for the first pending group only, or for any. Times are in seconds."""

    in_plan_order: bool
    timeout_s: float
    poll_interval_s: float

    @classmethod
    def of(cls, config: RunConfig) -> "FollowConfig":
        """How a run's training follows the journal."""
        return cls(
            in_plan_order=config.in_plan_order,
            timeout_s=config.trainer.group_timeout_s,
            poll_interval_s=config.trainer.poll_interval_s,
        )


def incarnations_to_read(reader: JournalReader, unfinished: Iterable[int]) -> list[str]:
    """The incarnations whose shards can still change these responses (docs/format.md algorithm R).

    They are the incarnations that hold the responses, and those whose sealed shards were not all read yet. No reader
    takes what other incarnations write.
    """
    names: dict[str, None] = {}
    for response in unfinished:
        owner = reader.book.owner(response)
        if owner is None:
            continue
        names[owner.incarnation] = None
        for span in reader.book.sealed(response):
            if span.last_sequence > reader.shards.last_sequence(span.incarnation):
                names[span.incarnation] = None
    return list(names)


class GroupFollower:
    """Finds the next finished group from claims and shards."""

    def __init__(
        self,
        reader: JournalReader,
        plan: PlanRecord,
        config: FollowConfig,
        clock: Clock,
        watch: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """watch: called after every look without a result, with whether the journal grew; may raise to end the wait."""
        self._watch = watch
        self._reader = reader
        self._plan = plan
        self._config = config
        self._clock = clock
        self._finished: dict[int, Assembled] = {}
        self._next_log_s = clock.monotonic() + LOG_INTERVAL_S
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        """The total seconds of waiting, each from a look at the journal without a result until after the next look."""
        return self._waited_s

    def wait(self, pending: Sequence[int], recorded: Callable[[], bool] = lambda: False) -> int:
        """Wait for the next finished group of `pending`, which is in plan order.

        It reads the journal of every pending group, whichever group it waits for, and any progress restarts the time
        limit. Raises GroupTimeout when the limit is over, RecordedElsewhereError once `recorded` returns True, and any
        error of `watch`.
        """
        seen, since_s = self._progress(), self._clock.monotonic()
        candidates = pending[:1] if self._config.in_plan_order else pending
        slept_at_s: float | None = None
        while True:
            group = next((group for group in candidates if self.is_finished(group)), None)
            if group is not None:
                return group
            self._reader.book.refresh()
            self._reader.shards.advance_all(incarnations_to_read(self._reader, self._unfinished(pending)))
            progress, now_s = self._progress(), self._clock.monotonic()
            progressed = progress != seen
            if slept_at_s is not None:
                self._waited_s += now_s - slept_at_s
                slept_at_s = None
            if progressed:
                seen, since_s = progress, now_s
                if any(self.is_finished(group) for group in candidates):
                    continue
            if recorded():
                raise RecordedElsewhereError
            self._watch(progressed)
            if now_s - since_s > self._config.timeout_s:
                raise GroupTimeout(self._describe(candidates))
            if now_s >= self._next_log_s:
                self._next_log_s = now_s + LOG_INTERVAL_S
                self._log_waiting(candidates, now_s - since_s)
            slept_at_s = now_s
            self._clock.sleep(self._config.poll_interval_s)

    def is_finished(self, group: int) -> bool:
        """Whether every response of the group has ended, as far as was read."""
        return all(self._end(response) for response in self.responses_in(group))

    def responses_in(self, group: int) -> range:
        """The response numbers of a group."""
        first = group * self._plan.num_generations
        return range(first, first + self._plan.num_generations)

    def response(self, response: int) -> Assembled:
        """The tokens of a finished response."""
        return self._finished[response]

    def release(self, group: int) -> None:
        """Drop a group's tokens after use."""
        for response in self.responses_in(group):
            self._finished.pop(response, None)

    def _end(self, response: int) -> bool:
        if response in self._finished:
            return True
        if response not in self._reader.shards.ended:
            return False
        assembled = self._reader.assemble(response)
        if assembled.finish.ends_response:
            self._finished[response] = assembled
        return assembled.finish.ends_response

    def _unfinished(self, groups: Sequence[int]) -> list[int]:
        return [response for group in groups for response in self.responses_in(group) if not self._end(response)]

    def _progress(self) -> int:
        shards = self._reader.shards
        return sum(shards.last_sequence(incarnation) + 1 for incarnation in self._reader.book.incarnations)

    def _log_waiting(self, groups: Sequence[int], still_s: float) -> None:
        lines = self._missing(groups)
        log.warning(
            "iteration %d: nothing new for %.0f s; waiting for %s", self._plan.iteration, still_s, "; ".join(lines)
        )

    def _describe(self, groups: Sequence[int]) -> str:
        return (
            f"iteration {self._plan.iteration}: nothing was journalled for {self._config.timeout_s:.0f} s; "
            "waiting for\n  " + "\n  ".join(self._missing(groups))
        )

    def _missing(self, groups: Sequence[int]) -> list[str]:
        """One line per unfinished response, with its tokens and its holder; a last line counts those left out."""
        waiting = self._unfinished(groups)
        lines = []
        for response in waiting[:RESPONSES_SHOWN]:
            owner = self._reader.book.owner(response)
            holder = f"held by {owner.incarnation}" if owner is not None else "not claimed"
            tokens = len(self._reader.assemble(response).token_ids)
            lines.append(
                f"response {response} (group {response // self._plan.num_generations}): {tokens} tokens, {holder}"
            )
        if len(waiting) > RESPONSES_SHOWN:
            lines.append(f"and {len(waiting) - RESPONSES_SHOWN} more")
        return lines
