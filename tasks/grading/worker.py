"""The child process in which reward functions run: `python -m tasks.grading.worker`, driven by isolation.py.

The process answers a "load" message, then "check", "prepare" and "grade" messages. The parent enforces time limits by
killing this process.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from resources.user_process import Replies, describe, serve_parent
from storage.digests import digest_of
from tasks.configuration.user_function import NotAFunction, load_function
from tasks.grading import math_answer
from tasks.grading.answer_limits import OutOfTime, limit_memory, limited_time
from tasks.grading.binding import BoundFunction, ProcessSpoiled, bind
from tasks.grading.outcome import batch_outcomes, value_outcome
from tasks.grading.reward import GradedConversation, GradingCase, GradingError, RewardOutcome


class FormatVerifier:
    """The format verifier: whether a completion as a whole matches a regular expression; "." matches line ends, too.

    Some expressions take exponential time, so the verifier runs in this process under a time limit.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    def grade(self, completion: str) -> float:
        """1.0 if the whole completion matches, otherwise 0.0."""
        return 1.0 if self._pattern.fullmatch(completion) else 0.0


def main() -> None:
    """Serve requests until standard input ends."""
    inbox, replies = serve_parent()
    request = inbox.get()
    bound, reply = _load(request["load"], request["settings"])
    _answer(replies, request, reply)
    while bound is not None:
        request = inbox.get()
        if "prepare" in request:
            _answer(replies, request, _attempted(bound.prepare))
        elif "check" in request:
            cases = _cases(request["check"])
            _answer(replies, request, _attempted(partial(bound.check, cases) if bound.check else None))
        else:
            _answer(replies, request, _grade(bound, _cases(request["grade"]), request["limit_s"]))


def _cases(rows: list[list[Any]]) -> list[GradingCase]:
    found = []
    for response, prompt, completion, completion_ids, columns, turns in rows:
        conversation = None if turns is None else GradedConversation(**turns)
        found.append(GradingCase(response, prompt, completion, completion_ids, columns, conversation))
    return found


def _answer(replies: Replies, request: dict[str, Any], reply: dict[str, Any]) -> None:
    replies.send({**reply, "secret": request["secret"]})


def _load(spec: str, settings: dict[str, Any]) -> tuple[BoundFunction | None, dict[str, Any]]:
    try:
        bound = _bound(spec, settings)
    except GradingError as error:
        return None, {"error": str(error)}
    except BaseException as error:  # noqa: BLE001 - an import may raise anything, sys.exit included
        return None, {"error": f"reward {spec!r} cannot be loaded: {describe(error)}"}
    if bound.verifies:
        limit_memory()
    return bound, {
        "needs": bound.needs,
        "batched": bound.batched,
        "prepares": bound.prepare is not None,
        "verifies": bound.verifies,
        "source": _source(spec),
    }


def _source(spec: str) -> str | None:
    """The digest of the file with the code of a user's loaded function; None for Gleaner's own, and without a file."""
    module_name, colon, _ = spec.partition(":")
    if not colon:
        return None
    # A package may offer what a module of it defines.
    defined_in = getattr(load_function(spec), "__module__", None)
    file = getattr(sys.modules.get(defined_in or module_name), "__file__", None)
    return None if file is None else digest_of(Path(file).read_bytes())


def _bound(spec: str, settings: dict[str, Any]) -> BoundFunction:
    if spec == "math":
        importlib.import_module("math_verify")  # here, so that it does not count against the first response's limit
        if not math_answer.works():
            raise GradingError("reward 'math' cannot be loaded: math-verify reads formulas wrongly here")
        return BoundFunction(
            math_answer.NEEDS,
            False,
            lambda cases: math_answer.grade_mathematics(cases[0]),
            check=math_answer.check_truths,
            verifies=True,
            works=math_answer.works,
        )
    if spec == "format":
        verifier = FormatVerifier(**settings)
        return BoundFunction((), False, lambda cases: verifier.grade(cases[0].completion), verifies=True)
    if spec == "reward_model":
        from tasks.grading.reward_model import RewardModel, RewardModelSettings  # noqa: PLC0415 - imports torch

        model = RewardModel(RewardModelSettings(**settings))
        return BoundFunction((), True, model.score, model.load, model.check)
    try:
        function = load_function(spec)
    except NotAFunction as error:
        raise GradingError(f"reward {spec!r}: {error}") from None
    if "arguments" in settings:
        function = function(**settings["arguments"])
        if not callable(function):
            raise GradingError(
                f"reward {spec!r} with arguments returned {type(function).__name__}; allowed: a reward function"
            )
    return bind(function, spec)


def _attempted(call: Callable[[], None] | None) -> dict[str, Any]:
    try:
        if call is not None:
            call()
    except GradingError as error:
        return {"error": str(error)}
    except BaseException as error:  # noqa: BLE001 - with damaged model files, libraries may raise anything
        return {"error": f"a reward cannot be used: {describe(error)}"}
    return {}


def _grade(bound: BoundFunction, cases: list[GradingCase], limit_s: float) -> dict[str, Any]:
    spoiled = False
    try:
        with limited_time(limit_s) if bound.verifies else nullcontext():
            returned = _awaited(partial(bound.call, cases))
        outcomes = batch_outcomes(returned, len(cases)) if bound.batched else [value_outcome(returned)]
    except OutOfTime:
        return {"hung": True, "spoiled": not _works(bound)}
    except BaseException as error:  # noqa: BLE001 - a reward function may raise anything, sys.exit included
        if not bound.verifies:
            return {"raised": describe(error), "spoiled": isinstance(error, ProcessSpoiled)}
        outcomes = [_given_up(bound, case, error) for case in cases]
        spoiled = not _works(bound)
    told = [[outcome.value, outcome.error, outcome.given_up] for outcome in outcomes]
    return {"outcomes": told, "spoiled": spoiled}


def _works(bound: BoundFunction) -> bool:
    try:
        return bound.works()
    except Exception:  # noqa: BLE001 - libraries that were interrupted may raise anything
        return False


def _given_up(bound: BoundFunction, case: GradingCase, error: BaseException) -> RewardOutcome:
    """The outcome of a case for which a verifier raised: an error if the row is at fault, else 0."""
    fault = _attempted(partial(bound.check, [case]) if bound.check else None).get("error")
    raised = f"raised {describe(error)}"
    return RewardOutcome(0.0, given_up=raised) if fault is None else RewardOutcome(None, raised)


def _awaited(call: Callable[[], Any]) -> Any:
    result = call()
    return _event_loop()(result) if inspect.isawaitable(result) else result


_RUNNERS: list[Callable[[Any], Any]] = []


def _event_loop() -> Callable[[Any], Any]:
    # One loop for all calls, because clients that a function keeps open belong to the loop that created them.
    if not _RUNNERS:
        import asyncio  # noqa: PLC0415 - only coroutine functions need it

        _RUNNERS.append(asyncio.Runner().run)
    return _RUNNERS[0]


if __name__ == "__main__":
    main()
