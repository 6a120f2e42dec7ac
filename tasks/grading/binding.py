"""Binding: recognises reward signatures of TRL and verl by parameter names, and calls functions with grading cases.

TRL: f(prompts, completions, completion_ids, **columns) -> one value per completion. verl: compute_score(data_source,
solution_str, ground_truth, extra_info) -> a value or a dict with "score", or compute_score(data_sources, solution_strs,
ground_truths, extra_infos) -> a value or dict per completion. Coroutine functions are awaited. For a response with
turns, TRL's function gets all messages after the prompt; verl's function gets the last answer, and
extra_info["messages"] from the prompt to the end.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.grading.reward import GradingCase, GradingError, Needs

TRL_PARAMETERS = ("prompts", "completions", "completion_ids")
# Further arguments of TRL's trainer; here they do nothing.
TRL_EXTRAS: dict[str, Any] = {
    "trainer_state": None,
    "log_extra": lambda *_args, **_kwargs: None,
    "log_metric": lambda *_args, **_kwargs: None,
}
TRL_ENVIRONMENTS = "environments"
VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
# verl's names for lists of the same, and the columns from which they come.
VERL_BATCHED = {
    "data_sources": "data_source",
    "solution_strs": "solution_str",
    "ground_truths": "ground_truth",
    "extra_infos": "extra_info",
}
FORMS = (
    "TRL's f(prompts, completions, completion_ids, **columns) -> list[float | None], or "
    "verl's f(data_source, solution_str, ground_truth, extra_info=None) -> float | dict or "
    "f(data_sources, solution_strs, ground_truths, extra_infos=None) -> list[float | dict]; "
    "a function that returns one of these needs the field 'arguments'"
)


class ProcessSpoiled(Exception):  # noqa: N818 - reads as what happened
    """Raised by a call that leaves its process unusable, such as by a CUDA error."""


@dataclass(frozen=True, slots=True)
class BoundFunction:
    """A reward function with a uniform call.

    Attributes:
        needs: The columns that the function needs.
        batched: True if `call` takes any number of cases; False for a single case per call.
        call: Takes cases and returns the function's result, an awaitable for a coroutine function: a sequence of values
            if `batched`, else a value. For a verifier, an exception, or too much time or memory, on a case that `check`
            allows means that the answer is given up.
        prepare: Called once before the first `call`, for work that is too costly for loading the function; None for
            nothing.
        check: Raises GradingError for cases that `call` could not grade; None for no check.
        verifies: True for a verifier of Gleaner's own, which fails for no answer.
        works: Whether the process is still usable after an answer was given up.
    """

    needs: Needs
    batched: bool
    call: Callable[[Sequence[GradingCase]], Any]
    prepare: Callable[[], None] | None = None
    check: Callable[[Sequence[GradingCase]], None] | None = None
    verifies: bool = False
    works: Callable[[], bool] = lambda: True


def bind(function: Callable[..., Any], name: str) -> BoundFunction:
    """Recognise the signature of `function`; GradingError names the function, its parameters and the accepted forms."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise GradingError(f"reward {name!r} has no readable signature; allowed: {FORMS}") from None
    named = {
        parameter.name: parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in signature.parameters.values()):
        raise _unfit(name, signature, "parameters must have usable names")
    families = (TRL_PARAMETERS, ("solution_str",), ("solution_strs",))
    is_trl, is_verl, is_batched = (any(each in named for each in family) for family in families)
    required = [each for each, parameter in named.items() if parameter.default is parameter.empty]
    if TRL_ENVIRONMENTS in required and not (is_verl or is_batched):
        reason = (
            f"its parameter {TRL_ENVIRONMENTS!r} wants the environments, which have ended where the responses were "
            "generated; let the environment's get_reward() return the value, with the reward 'environment'"
        )
        raise _unfit(name, signature, reason)
    if is_trl + is_verl + is_batched != 1:
        raise _unfit(name, signature, "it is both" if is_trl or is_verl else "it is neither")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    accepted = None if takes_any else set(named)
    if is_trl:
        needs = tuple((each,) for each in required if each not in (*TRL_PARAMETERS, *TRL_EXTRAS))
        return BoundFunction(needs, True, lambda cases: _call_trl(function, cases, accepted))
    columns = VERL_BATCHED if is_batched else {each: each for each in VERL_PARAMETERS}
    unknown = [each for each in required if each not in columns]
    if unknown:
        raise _unfit(name, signature, f"nothing is known to pass as {', '.join(unknown)}")
    needs = tuple((columns[each],) for each in required if columns[each] in ("data_source", "ground_truth"))
    if is_batched:
        return BoundFunction(needs, True, lambda cases: _call_verl_batched(function, cases, accepted))
    return BoundFunction(needs, False, lambda cases: _call_verl(function, cases[0], accepted))


def _unfit(name: str, signature: inspect.Signature, reason: str) -> GradingError:
    return GradingError(f"reward {name!r} has the signature {signature}: {reason}; allowed: {FORMS}")


def _call_trl(function: Callable[..., Any], cases: Sequence[GradingCase], accepted: set[str] | None) -> Any:
    columns = {column for case in cases for column in case.columns}
    arguments: dict[str, Any] = {column: [case.columns.get(column) for case in cases] for column in columns}
    arguments |= TRL_EXTRAS
    arguments["prompts"] = [case.prompt for case in cases]
    arguments["completions"] = [_trl_completion(case) for case in cases]
    arguments["completion_ids"] = [list(case.completion_ids) for case in cases]
    return function(**_accepted(arguments, accepted))


def _trl_completion(case: GradingCase) -> str | list[dict[str, Any]]:
    if case.conversation is not None:
        return case.conversation.messages[case.conversation.num_prompt_messages :]
    if isinstance(case.prompt, str):
        return case.completion
    return [{"role": "assistant", "content": case.completion}]


def _call_verl(function: Callable[..., Any], case: GradingCase, accepted: set[str] | None) -> Any:
    arguments: dict[str, Any] = {name: case.columns[name] for name in VERL_PARAMETERS if name in case.columns}
    arguments["solution_str"] = case.completion
    arguments["extra_info"] = _extra_info(case)
    return function(**_accepted(arguments, accepted))


def _call_verl_batched(function: Callable[..., Any], cases: Sequence[GradingCase], accepted: set[str] | None) -> Any:
    arguments: dict[str, Any] = {
        name: [case.columns.get(column) for case in cases]
        for name, column in VERL_BATCHED.items()
        if any(column in case.columns for case in cases)
    }
    arguments["solution_strs"] = [case.completion for case in cases]
    arguments["extra_infos"] = [_extra_info(case) for case in cases]
    return function(**_accepted(arguments, accepted))


def _extra_info(case: GradingCase) -> Any:
    """The column extra_info, or {} without the column, as in verl; with turns the conversation is added."""
    given = case.columns.get("extra_info", {})
    if case.conversation is None:
        return given
    return {**(given or {}), "messages": case.conversation.messages}


def _accepted(arguments: dict[str, Any], accepted: set[str] | None) -> dict[str, Any]:
    return arguments if accepted is None else {name: arguments[name] for name in arguments.keys() & accepted}
