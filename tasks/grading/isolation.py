"""A reward function in a child process, so that time limits hold and a failure affects only the response causing it.

When a time limit passes, the child is killed and started again; every wait has a limit. Signatures are in binding.py,
in the child, and weights of rewards in grader.py.
"""

import contextlib
import logging
import secrets
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from resources import user_process
from resources.wire import PeerGone, receive, send
from tasks.grading.answer_limits import GRACE_S
from tasks.grading.patience import Patience
from tasks.grading.reward import GradingCase, GradingError, Needs, RewardOutcome

_EXIT_TIME_LIMIT_S = 1.0
_LOG = logging.getLogger(__name__)


class CallFailed(Exception):  # noqa: N818 - reads as what happened
    """A call gave no outcomes; the message is the end of a sentence about the function, with the reason."""


class CallHung(CallFailed):
    """The call took all of its time."""


class ProcessEnded(CallFailed):
    """The call ended the process."""


class WorkerProcess:
    """A child process with one loaded function, started when first needed and again after a kill."""

    def __init__(
        self,
        function: str,
        load_time_limit_s: float,
        settings: Mapping[str, Any],
        environment_variables: Collection[str] = (),
    ) -> None:
        """environment_variables: the credentials that the function sees."""
        self._environment_variables = environment_variables
        self._function = function
        self._settings = dict(settings)
        self._load_time_limit_s = load_time_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._prepares = self._is_prepared = self._verifies = False
        self.start_s = 0.0
        """How long it took to load and prepare the function the last time."""

    @property
    def is_running(self) -> bool:
        """Whether a child has been started and not killed."""
        return self._process is not None

    def load(self) -> dict[str, Any]:
        """Start a child, in place of a running child; return its description of the function. Raises GradingError."""
        self.kill()
        began_s = time.monotonic()
        self._process = user_process.start("tasks.grading.worker", self._environment_variables)
        try:
            reply = self._exchange({"load": self._function, "settings": self._settings}, self._load_time_limit_s)
        except CallFailed as error:
            raise GradingError(f"reward {self._function!r} cannot be loaded: it {error}") from None
        if "error" in reply:
            self.kill()
            raise GradingError(reply["error"])
        self._prepares = reply["prepares"]
        self._is_prepared = not self._prepares
        self._verifies = reply["verifies"]
        self.start_s = time.monotonic() - began_s
        return reply

    def prepare(self) -> None:
        """Have the child prepare its function, once before the first call. Raises GradingError."""
        if self._process is None:
            self.load()
        if self._is_prepared:
            return
        began_s = time.monotonic()
        try:
            reply = self._exchange({"prepare": True}, self._load_time_limit_s)
        except CallFailed as error:
            raise GradingError(f"reward {self._function!r} cannot be prepared: it {error}") from None
        if "error" in reply:
            self.kill()
            raise GradingError(reply["error"])
        self._is_prepared = True
        self.start_s += time.monotonic() - began_s

    def check(self, cases: Sequence[GradingCase]) -> None:
        """Raise GradingError for the first case that the loaded function could not grade."""
        try:
            reply = self._exchange({"check": _rows(cases)}, self._load_time_limit_s)
        except CallFailed as error:
            raise GradingError(f"reward {self._function!r} cannot be checked: it {error}") from None
        if "error" in reply:
            raise GradingError(reply["error"])

    def make_ready(self) -> None:
        """Start the child and prepare its function, if not done already; raises CallFailed.

        A failure to prepare a function, or to start a verifier of Gleaner's own, is tried once more and then raises
        GradingError, because missing weights or memory are not the responses' fault.
        """
        try:
            self.prepare()
        except GradingError as error:
            if not self._prepares and not self._verifies:
                raise CallFailed(f"could not be started again: {error}") from None
            _LOG.warning("%s; trying once more", error)
            self.prepare()

    def grade(self, cases: Sequence[GradingCase], time_limit_s: float, grace_s: float = 0.0) -> list[RewardOutcome]:
        """The outcomes of one call of the function; raises CallFailed, and GradingError as `make_ready` does.

        grace_s: seconds that this process waits beyond the limit, for a function that observes the limit itself.
        """
        self.make_ready()
        reply = self._exchange({"grade": _rows(cases), "limit_s": time_limit_s}, time_limit_s, grace_s)
        if reply.get("spoiled"):
            self.kill()
        if "hung" in reply:
            raise CallHung(_no_answer(time_limit_s))
        if "raised" in reply:
            raise CallFailed(f"raised {reply['raised']}")
        return [RewardOutcome(*outcome) for outcome in reply["outcomes"]]

    def kill(self) -> None:
        """End the child, if any, and all processes of the child."""
        process, self._process = self._process, None
        if process is None:
            return
        user_process.end(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _exchange(self, message: dict[str, Any], time_limit_s: float, grace_s: float = 0.0) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise CallFailed("has no process")
        deadline_s = time.monotonic() + time_limit_s + grace_s
        # What a function has written beside the protocol answers no call.
        secret = secrets.token_hex(16)
        try:
            send(process.stdin.fileno(), {**message, "secret": secret}, deadline_s)
            return _reply_to(secret, receive(process.stdout.fileno(), deadline_s))
        except TimeoutError:
            self.kill()
            raise CallHung(_no_answer(time_limit_s)) from None
        except (ValueError, KeyError, TypeError):
            self.kill()
            raise ProcessEnded("wrote what is no reply") from None
        except PeerGone:
            # The pipe closes a moment before the process has an exit status, and killing it then would hide that.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_TIME_LIMIT_S)
            self.kill()
            raise ProcessEnded(f"ended its process with status {process.returncode}") from None


def _reply_to(secret: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to the request with this secret; ValueError, KeyError or TypeError for any other message."""
    if message["secret"] != secret:
        raise ValueError(secret)
    return message


def _no_answer(time_limit_s: float) -> str:
    return f"did not answer within {time_limit_s:.3g} s"


def _rows(cases: Sequence[GradingCase]) -> list[list[Any]]:
    return [
        [c.response, c.prompt, c.completion, c.completion_ids, c.columns, c.conversation and asdict(c.conversation)]
        for c in cases
    ]


class IsolatedReward:
    """A Reward whose function runs in a child process.

    If the call for a batch raises, runs out of time or ends the process, the responses are graded again one by one, in
    the time that `Patience` allows. A verifier of Gleaner's own never fails for an answer, but gives the answer up.
    """

    def __init__(
        self,
        name: str,
        function: str,
        time_limit_s: float,
        load_time_limit_s: float,
        settings: Mapping[str, Any] | None = None,
        *,
        stops: bool = False,
        environment_variables: Collection[str] = (),
    ) -> None:
        """Start the child and load `function`.

        Args:
            name: The reward's name in messages and records.
            function: A built-in function or "module:function".
            time_limit_s: The time limit of a call.
            load_time_limit_s: The time limit of loading and preparing the function.
            settings: The settings of a built-in function, or the arguments of a factory.
            stops: True if the first failure ends grading with GradingError.
            environment_variables: The credentials that the function sees.

        Raises:
            GradingError: The function cannot be used.
        """
        self.name = name
        self._time_limit_s = time_limit_s
        self._stops = stops
        self._worker = WorkerProcess(function, load_time_limit_s, settings or {}, environment_variables)
        description = self._worker.load()
        self.needs: Needs = tuple(tuple(alternatives) for alternatives in description["needs"])
        self.source: str | None = description["source"]
        """The digest of the file with the code of a user's function; None for Gleaner's own."""
        self._batched = bool(description["batched"])
        self._verifies = bool(description["verifies"])
        self._patience = Patience(time_limit_s)

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        """See `Reward`; raises GradingError if the function cannot be prepared, and for a failure if that `stops`."""
        self._patience.expect(len(batch))
        outcomes = self._grade_at_once(batch) if self._batched and len(batch) > 1 else None
        if outcomes is not None:
            return [self._named(case, outcome) for case, outcome in zip(batch, outcomes, strict=True)]
        return [
            self._named(case, self._grade_one(case, len(batch) - place)) for place, case in enumerate(batch, start=1)
        ]

    def check(self, cases: Sequence[GradingCase]) -> None:
        """Raise GradingError for cases that the function says it could not grade, such as by their ground truth."""
        self._worker.check(cases)

    def attempt(self, case: GradingCase) -> RewardOutcome:
        """The outcome of a trial call for a response; a function for batches gets the response twice.

        Two cases reveal a batch function that returns a single value for any number of cases. An error does not name
        the response.
        """
        try:
            outcomes = self._worker.grade([case] * (2 if self._batched else 1), self._time_limit_s)
        except CallFailed as error:
            return RewardOutcome(None, str(error))
        return next((outcome for outcome in outcomes if outcome.error is not None), outcomes[0])

    def close(self) -> None:
        self._worker.kill()

    def _grade_at_once(self, batch: Sequence[GradingCase]) -> list[RewardOutcome] | None:
        """The outcomes of a single call for the batch; None if the call fails, or if patience is used up."""
        if not self._patience.allowed_s(self._worker.start_s):
            return None
        try:
            return self._call(batch, self._time_limit_s)
        except CallFailed as error:
            told = "reward %s %s for a batch of %d; grading one response at a time"
            _LOG.warning(told, self.name, error, len(batch))
            return None

    def _grade_one(self, case: GradingCase, left: int) -> RewardOutcome:
        """The outcome of a call for a single response, with `left` responses still to grade afterwards."""
        patience = self._patience
        allowed_s = patience.allowed_s(self._worker.start_s)
        if not allowed_s:
            return self._in_vain(f"was not called, after {patience.hung} calls that hung")
        try:
            return self._call([case], allowed_s)[0]
        except CallHung as error:
            patience.hung += 1
            self._tell_of_hung(left)
            return self._in_vain(str(error))
        except ProcessEnded as error:
            return self._in_vain(str(error))
        except CallFailed as error:
            return RewardOutcome(None, str(error))

    def _call(self, cases: Sequence[GradingCase], limit_s: float) -> list[RewardOutcome]:
        """Call the function once and note the time; raises CallFailed."""
        began_s = time.monotonic()
        try:
            self._worker.make_ready()
        except CallFailed:
            self._patience.lost(time.monotonic() - began_s, ended=True)
            raise
        began_s = time.monotonic()
        try:
            outcomes = self._worker.grade(cases, limit_s, GRACE_S if self._verifies else 0.0)
        except (CallHung, ProcessEnded):
            ended = not self._worker.is_running
            start_s = self._worker.start_s if ended else 0.0
            self._patience.lost(time.monotonic() - began_s + start_s, ended=ended)
            raise
        self._patience.answered(time.monotonic() - began_s)
        return outcomes

    def _in_vain(self, told: str) -> RewardOutcome:
        """The outcome of a response whose call was not answered; `told` is the reason."""
        return RewardOutcome(0.0, given_up=told) if self._verifies else RewardOutcome(None, told)

    def _tell_of_hung(self, left: int) -> None:
        """Log the number of responses that have hung, while the remaining responses wait: at 1, 2, 4 and so on."""
        hung, lost_s = self._patience.hung, self._patience.lost_s
        if hung.bit_count() == 1:
            told = (
                "reward %s: responses of this iteration for which it hung: %d; %.1f s are lost, and %d more wait for it"
            )
            _LOG.warning(told, self.name, hung, lost_s, left)

    def _named(self, case: GradingCase, outcome: RewardOutcome) -> RewardOutcome:
        told = f"reward {self.name} of response {case.response}"
        if outcome.error is not None:
            if self._stops:
                raise GradingError(f"{told} {outcome.error}")
            return RewardOutcome(None, f"{told} {outcome.error}")
        return outcome if outcome.given_up is None else replace(outcome, given_up=f"{told} {outcome.given_up}")
