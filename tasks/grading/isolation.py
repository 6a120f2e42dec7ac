"""A reward function in a child process, so that time limits hold and a failure affects only the response causing it.

When a time limit passes, the child is killed and started again; every wait has a limit. Signatures are in binding.py,
in the child, and weights of rewards in grader.py.
"""

import contextlib
import logging
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from resources import user_process
from resources.wire import PeerGone, receive, send
from tasks.grading.reward import GradingCase, GradingError, Needs, RewardOutcome

_EXIT_TIME_LIMIT_S = 1.0
_LOG = logging.getLogger(__name__)


class CallFailed(Exception):  # noqa: N818 - reads as what happened
    """A call gave no outcomes; the message is the end of a sentence about the function that says why."""


class WorkerProcess:
    """A child process with one loaded function, started when first needed and again after a kill."""

    def __init__(self, function: str, load_time_limit_s: float, settings: Mapping[str, Any]) -> None:
        self._function = function
        self._settings = dict(settings)
        self._load_time_limit_s = load_time_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._prepares = self._is_prepared = False

    def load(self) -> dict[str, Any]:
        """Start a child, in place of a running one, and return its description of the function. Raises GradingError."""
        self.kill()
        self._process = user_process.start("tasks.grading.worker")
        try:
            reply = self._exchange({"load": self._function, "settings": self._settings}, self._load_time_limit_s)
        except CallFailed as error:
            raise GradingError(f"reward {self._function!r} cannot be loaded: it {error}") from None
        if "error" in reply:
            self.kill()
            raise GradingError(reply["error"])
        self._prepares = reply["prepares"]
        self._is_prepared = not self._prepares
        return reply

    def prepare(self) -> None:
        """Have the child prepare its function, once before the first call. Raises GradingError."""
        if self._process is None:
            self.load()
        if self._is_prepared:
            return
        try:
            reply = self._exchange({"prepare": True}, self._load_time_limit_s)
        except CallFailed as error:
            raise GradingError(f"reward {self._function!r} cannot be prepared: it {error}") from None
        if "error" in reply:
            self.kill()
            raise GradingError(reply["error"])
        self._is_prepared = True

    def check(self, cases: Sequence[GradingCase]) -> None:
        """Raise GradingError for the first of these cases that the loaded function could not grade."""
        try:
            reply = self._exchange({"check": _rows(cases)}, self._load_time_limit_s)
        except CallFailed as error:
            raise GradingError(f"reward {self._function!r} cannot be checked: it {error}") from None
        if "error" in reply:
            raise GradingError(reply["error"])

    def grade(self, cases: Sequence[GradingCase], time_limit_s: float) -> list[RewardOutcome]:
        """The outcomes of one call of the function; raises CallFailed.

        If preparing the function fails, it is tried once more and then raises GradingError, because missing weights or
        memory are not the responses' fault.
        """
        try:
            self.prepare()
        except GradingError as error:
            if not self._prepares:
                raise CallFailed(f"could not be started again: {error}") from None
            _LOG.warning("%s; trying once more", error)
            self.prepare()
        reply = self._exchange({"grade": _rows(cases)}, time_limit_s)
        if reply.get("spoiled"):
            self.kill()
        if "raised" in reply:
            raise CallFailed(f"raised {reply['raised']}")
        return [RewardOutcome(*outcome) for outcome in reply["outcomes"]]

    def kill(self) -> None:
        """End the child and all processes that it started, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        user_process.end(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _exchange(self, message: dict[str, Any], time_limit_s: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise CallFailed("has no process")
        deadline_s = time.monotonic() + time_limit_s
        try:
            send(process.stdin.fileno(), message, deadline_s)
            return receive(process.stdout.fileno(), deadline_s)
        except TimeoutError:
            self.kill()
            raise CallFailed(f"did not answer within {time_limit_s:g} s") from None
        except PeerGone:
            # The pipe closes a moment before the process has an exit status, and killing it then would hide that.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_TIME_LIMIT_S)
            self.kill()
            raise CallFailed(f"ended its process with status {process.returncode}") from None


def _rows(cases: Sequence[GradingCase]) -> list[list[Any]]:
    return [
        [c.response, c.prompt, c.completion, c.completion_ids, c.columns, c.conversation and asdict(c.conversation)]
        for c in cases
    ]


class IsolatedReward:
    """A Reward whose function runs in a child process.

    If the call for a batch raises, runs out of time or ends the process, the responses are graded again one by one.
    """

    def __init__(
        self,
        name: str,
        function: str,
        time_limit_s: float,
        load_time_limit_s: float,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the child and load `function`, with the `settings` of a built-in function or a factory's arguments.

        Raises GradingError if it cannot be used.
        """
        self.name = name
        self._time_limit_s = time_limit_s
        self._worker = WorkerProcess(function, load_time_limit_s, settings or {})
        description = self._worker.load()
        self.needs: Needs = tuple(tuple(alternatives) for alternatives in description["needs"])
        self._batched = bool(description["batched"])

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        """See `Reward`; raises GradingError if the function cannot be prepared."""
        if self._batched and len(batch) > 1:
            try:
                outcomes = self._worker.grade(batch, self._time_limit_s)
            except CallFailed as error:
                _LOG.warning(
                    "reward %s %s for a batch of %d; grading one response at a time", self.name, error, len(batch)
                )
            else:
                return [self._named(case, outcome) for case, outcome in zip(batch, outcomes, strict=True)]
        return [self._grade_one(case) for case in batch]

    def check(self, cases: Sequence[GradingCase]) -> None:
        """Raise GradingError for cases that the function says it could not grade, such as by their ground truth."""
        self._worker.check(cases)

    def close(self) -> None:
        self._worker.kill()

    def _grade_one(self, case: GradingCase) -> RewardOutcome:
        try:
            outcome = self._worker.grade([case], self._time_limit_s)[0]
        except CallFailed as error:
            outcome = RewardOutcome(None, str(error))
        return self._named(case, outcome)

    def _named(self, case: GradingCase, outcome: RewardOutcome) -> RewardOutcome:
        if outcome.error is None:
            return outcome
        return RewardOutcome(None, f"reward {self.name} of response {case.response} {outcome.error}")
