"""Clashes of `algorithm.kind` with other sections.

With "sft" no policy samples and nothing grades, so settings of both are refused instead of ignored.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.data import DataConfig
from tasks.configuration.external_clashes import is_external
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.sampling import SamplingConfig

_KIND = "algorithm.kind 'sft'"
# The field of the section that has a meaning for examples.
_READ_OF_SAMPLING = "sampling.max_completion_length"
# The number of responses per group that stands for "not given", and that of examples.
_GROUP_DEFAULT, _GROUP_OF_EXAMPLES = 8, 1


def group_size(algorithm: AlgorithmConfig, num_generations: int) -> int:
    """The number of responses to a prompt: run.num_generations, or 1 for examples."""
    return _GROUP_OF_EXAMPLES if algorithm.learns_examples else num_generations


def with_kind(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document in which the rewards of a run that needs none, which are an empty list, are left out."""
    if _needs_no_rewards(document) and document.get("rewards") in ([], ()):
        return {name: value for name, value in document.items() if name != "rewards"}
    return document


def missing_rewards(document: Mapping[str, Any]) -> list[str]:
    """The line about missing rewards, which a run must have unless it learns examples or an external trainer grades."""
    lacks = "rewards" not in document and not _needs_no_rewards(document)
    return ["rewards: missing; it has no default"] if lacks else []


def _needs_no_rewards(document: Mapping[str, Any]) -> bool:
    algorithm = document.get("algorithm")
    return is_external(document) or (isinstance(algorithm, Mapping) and algorithm.get("kind") == "sft")


def kinds_that_clash(config: Any) -> Iterator[str]:
    """A line about each field that cannot be, with what is allowed. config: the RunConfig."""
    completion = DataConfig().completion_column
    sections = {"data": config.data} | ({"evaluation.data": config.evaluation.data} if config.evaluation else {})
    for section, data in sections.items():
        is_of_examples = config.algorithm.learns_examples and section == "data"
        if data.completion_column != completion and not is_of_examples:
            yield (
                f"{section}.completion_column: value {json.dumps(data.completion_column)}; allowed: "
                f"{json.dumps(completion)}, unless it is of a run with {_KIND}"
            )
    if config.algorithm.learns_examples:
        yield from _given_in_vain(config)
        yield from _without_effect(config)


def _given_in_vain(config: Any) -> Iterator[str]:
    why = "because a data set has the responses"
    if config.rewards:
        yield f"rewards: given; allowed with {_KIND}: nothing, {why} (evaluation.rewards grades an evaluation)"
    if config.evaluation is not None and config.evaluation.rewards is None:
        yield f"evaluation.rewards: value null; allowed with {_KIND}: at least one, because the run has none"
    if config.turns is not None:
        yield f"turns: given; allowed with {_KIND}: nothing, {why}, and conversations come from data.prompt_column"
    if config.run.num_generations != _GROUP_DEFAULT:
        yield f"run.num_generations: value {config.run.num_generations}; allowed with {_KIND}: nothing, {why}"
    if config.rollout.crew != "iteration":
        yield f"rollout.crew: value {config.rollout.crew!r}; allowed with {_KIND}: 'iteration', {why}"
    if config.data.continue_final_message:
        yield f"data.continue_final_message: value true; allowed with {_KIND}: false, {why}"


def _without_effect(config: Any) -> Iterator[str]:
    sections: dict[str, tuple[Any, Any]] = {
        "sampling": (config.sampling, SamplingConfig()),
        "planning": (config.planning, PlanningConfig()),
    }
    for section, (given, default) in sections.items():
        for item in fields(default):
            value, allowed = (getattr(each, item.name) for each in (given, default))
            if f"{section}.{item.name}" != _READ_OF_SAMPLING and value != allowed:
                yield (
                    f"{section}.{item.name}: value {json.dumps(value)}; allowed with {_KIND}: {json.dumps(allowed)}, "
                    "because nothing reads it"
                )
