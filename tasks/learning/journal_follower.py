"""Following the journal: which groups are finished, and which responses are missing when no group finishes in time.

The follower needs no running rollout: a journal of members that have left is read to its end.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage.clock import Clock
from storage.errors import GleanerError
from storage.journal.assembly import Assembled, JournalReader
from storage.records.records import PlanRecord
from storage.waiting import SILENT_S, moment
from tasks.configuration.run_config import RunConfig
from tasks.learning.arrivals import ArrivingShards

log = logging.getLogger(__name__)
RESPONSES_SHOWN = 6
LOG_INTERVAL_S = 30.0


class GroupTimeout(GleanerError, TimeoutError):  # noqa: N818 - reads as what happened
    """No token came for group_timeout_s while a group was unfinished; names the responses and who holds them."""


class RecordedElsewhereError(Exception):
    """A competing attempt has recorded the micro-batch for which this attempt waits; waiting has become pointless."""


@dataclass(frozen=True, kw_only=True)
class FollowConfig:
    """How a follower reads the journal.

    Attributes:
        in_plan_order: True waits for the first pending group only, False for any pending group.
        timeout_s: Seconds without progress after which `GroupTimeout` is raised.
        poll_interval_s: Seconds between two looks at the journal.
        flush_interval_s: Seconds between two shards of a member.
    """

    in_plan_order: bool
    timeout_s: float
    poll_interval_s: float
    flush_interval_s: float

    @classmethod
    def of(cls, config: RunConfig) -> "FollowConfig":
        """How a run's training follows the journal."""
        return cls(
            in_plan_order=config.in_plan_order,
            timeout_s=config.trainer.group_timeout_s,
            poll_interval_s=config.rollout.poll_interval_s,
            flush_interval_s=config.rollout.flush_interval_s,
        )


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
        """Follow the journal of an iteration.

        Args:
            reader: Reads claims and shards.
            plan: The iteration's plan.
            config: How the journal is followed.
            clock: The clock of all waits.
            watch: Called after every look without a result, with True if the journal grew; may raise to end the wait.
        """
        self._watch = watch
        self._reader = reader
        self._plan = plan
        self._config = config
        self._clock = clock
        self._arriving = ArrivingShards(reader, config.flush_interval_s, config.poll_interval_s)
        self._finished: dict[int, Assembled] = {}
        self._unended = set(range(plan.num_responses))
        self._left = [plan.num_generations] * plan.num_groups
        self._next_log_s = clock.monotonic()
        # Members write that rarely if all is well.
        self._silent_s = max(SILENT_S, 2 * config.flush_interval_s)
        self._waited_s = 0.0
        self._tokens = 0
        # What is waited for, if that takes long.
        self._waits_for = ""

    def in_words(self) -> str:
        """The progress in one line: ended responses, tokens, and the missing groups; any thread may call it."""
        ended, planned, groups = self._plan.num_responses - len(self._unended), self._plan.num_responses, self._left
        waits_for = self._waits_for or f"{sum(map(bool, groups))} groups"
        waiting = f"; waits for {waits_for}" if ended < planned else ""
        return f"{ended:,} of {planned:,} responses have ended, with {self._tokens:,} tokens{waiting}"

    @property
    def waited_s(self) -> float:
        """The total seconds of waiting, each from a look at the journal without a result until after the next look."""
        return self._waited_s

    def wait(self, pending: Sequence[int], recorded: Callable[[], bool] = lambda: False) -> int:
        """Wait for the next finished group of `pending`, which is in plan order.

        The follower reads the journals of all pending groups, whichever group is next, and any progress restarts the
        time limit. Raises GroupTimeout when the limit is over, RecordedElsewhereError once `recorded` returns True, and
        any error of `watch`.
        """
        seen, since_s = self._progress(), self._clock.monotonic()
        candidates = pending[:1] if self._config.in_plan_order else pending
        slept_at_s: float | None = None
        while True:
            group = next((group for group in candidates if self.is_finished(group)), None)
            if group is not None:
                return group
            self._read(pending)
            progress, now_s = self._progress(), self._clock.monotonic()
            progressed = progress != seen
            if slept_at_s is not None:
                self._waited_s += now_s - slept_at_s
                slept_at_s = None
            if progressed:
                seen, since_s, self._waits_for = progress, now_s, ""
                if any(self.is_finished(group) for group in candidates):
                    continue
            if recorded():
                raise RecordedElsewhereError
            self._watch(progressed)
            if now_s - since_s > self._config.timeout_s:
                raise GroupTimeout(self._describe(candidates))
            if now_s >= max(self._next_log_s, since_s + self._silent_s):
                self._next_log_s = now_s + LOG_INTERVAL_S
                self._log_waiting(candidates, now_s - since_s)
            slept_at_s = now_s
            self._clock.sleep(self._config.poll_interval_s)

    def is_finished(self, group: int) -> bool:
        """Whether every response of the group has ended, as far as was read."""
        return not self._left[group]

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

    def _read(self, pending: Sequence[int]) -> None:
        """Read new claims, and the shards that may have come; then find the responses that have ended."""
        self._arriving.look(lambda: self._unfinished(pending), self._clock.monotonic())
        # An end that no claim counts may stand in the journal; it is looked at again each time.
        for response in self._reader.shards.ended & self._unended:
            assembled = self._reader.assemble(response)
            if assembled.finish.ends_response:
                self._finished[response] = assembled
                self._unended.discard(response)
                self._tokens += len(assembled.token_ids)
                self._left[response // self._plan.num_generations] -= 1

    def _unfinished(self, groups: Sequence[int]) -> list[int]:
        open_groups = (group for group in groups if self._left[group])
        return [response for group in open_groups for response in self.responses_in(group) if response in self._unended]

    def _progress(self) -> int:
        shards = self._reader.shards
        return sum(shards.last_sequence(incarnation) + 1 for incarnation in self._reader.book.incarnations)

    def _log_waiting(self, groups: Sequence[int], still_s: float) -> None:
        self._waits_for = "; ".join(self._missing(groups))
        log.warning(
            "iteration %d: nothing new for %.0f s; waiting until %s (trainer.group_timeout_s) for %s",
            self._plan.iteration,
            still_s,
            moment(self._clock.wall() + self._config.timeout_s - still_s),
            self._waits_for,
        )

    def _describe(self, groups: Sequence[int]) -> str:
        return (
            f"iteration {self._plan.iteration}: nothing was journalled for {self._config.timeout_s:.0f} s; "
            "waiting for\n  " + "\n  ".join(self._missing(groups))
        )

    def _missing(self, groups: Sequence[int]) -> list[str]:
        """One line per unfinished response, with tokens and holder; a last line counts the responses left out."""
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
