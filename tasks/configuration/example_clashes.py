"""Clashes of `algorithm.kind` with other sections.

With "sft" and "dpo" no policy samples and nothing grades, so settings of both are refused instead of ignored.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.data import DataConfig
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.run_selection import selections_that_clash
from tasks.configuration.sampling import SamplingConfig

# The field of the section that has a meaning for examples.
_READ_OF_SAMPLING = "sampling.max_completion_length"
# The number of responses per group that stands for "not given", and that of examples.
_GROUP_DEFAULT, _GROUP_OF_EXAMPLES = 8, {"sft": 1, "dpo": 2}
# The fields of the section `data` that a kind alone reads.
_COLUMNS = {"completion_column": "sft", "chosen_column": "dpo", "rejected_column": "dpo"}


def group_size(algorithm: AlgorithmConfig, num_generations: int) -> int:
    """The number of responses to a prompt: run.num_generations, or 1 for examples, and 2 for pairs of examples."""
    return _GROUP_OF_EXAMPLES.get(algorithm.kind, num_generations)


def with_kind(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document without the empty rewards of a run of examples, or of a run with a teacher."""
    if _needs_no_rewards(document) and document.get("rewards") in ([], ()):
        return {name: value for name, value in document.items() if name != "rewards"}
    return document


def missing_rewards(document: Mapping[str, Any]) -> list[str]:
    """The line about missing rewards, which a run without examples and without a teacher must have."""
    lacks = "rewards" not in document and not _needs_no_rewards(document)
    return ["rewards: missing; it has no default"] if lacks else []


def _needs_no_rewards(document: Mapping[str, Any]) -> bool:
    algorithm = document.get("algorithm")
    learns_examples = isinstance(algorithm, Mapping) and algorithm.get("kind") in tuple(_GROUP_OF_EXAMPLES)
    return document.get("teacher") is not None or learns_examples


def kinds_that_clash(config: Any) -> Iterator[str]:
    """A line about each field that cannot be, with what is allowed. config: the RunConfig."""
    sections = {"data": config.data} | ({"evaluation.data": config.evaluation.data} if config.evaluation else {})
    for section, data in sections.items():
        kind = config.algorithm.kind if section == "data" else "rl"
        for name, reader in _COLUMNS.items():
            value, default = getattr(data, name), getattr(DataConfig(), name)
            if value != default and kind != reader:
                yield (
                    f"{section}.{name}: value {json.dumps(value)}; allowed: {json.dumps(default)}, unless it is of a "
                    f"run with algorithm.kind '{reader}'"
                )
    yield from selections_that_clash(config)
    if config.algorithm.learns_examples:
        yield from _given_in_vain(config)
        yield from _without_effect(config)


def _given_in_vain(config: Any) -> Iterator[str]:
    kind, why = f"algorithm.kind {config.algorithm.kind!r}", "because a data set has the responses"
    if config.rewards:
        yield f"rewards: given; allowed with {kind}: nothing, {why} (evaluation.rewards grades an evaluation)"
    if config.evaluation is not None and config.evaluation.rewards is None:
        yield f"evaluation.rewards: value null; allowed with {kind}: at least one, because the run has none"
    if config.turns is not None:
        yield f"turns: given; allowed with {kind}: nothing, {why}, and conversations come from data.prompt_column"
    if config.run.num_generations != _GROUP_DEFAULT:
        yield f"run.num_generations: value {config.run.num_generations}; allowed with {kind}: nothing, {why}"
    if config.rollout.crew != "iteration":
        yield f"rollout.crew: value {config.rollout.crew!r}; allowed with {kind}: 'iteration', {why}"
    if config.trainer.trained_by_host:
        yield (
            f"trainer.placement: value {config.trainer.placement!r}; allowed with {kind}: 'own' or 'pod', because a "
            "host is for the time of a rollout, which examples do not have"
        )
    if config.data.continue_final_message:
        yield f"data.continue_final_message: value true; allowed with {kind}: false, {why}"


def _without_effect(config: Any) -> Iterator[str]:
    kind = f"algorithm.kind {config.algorithm.kind!r}"
    sections: dict[str, tuple[Any, Any]] = {
        "sampling": (config.sampling, SamplingConfig()),
        "planning": (config.planning, PlanningConfig()),
    }
    for section, (given, default) in sections.items():
        for item in fields(default):
            value, allowed = (getattr(each, item.name) for each in (given, default))
            if f"{section}.{item.name}" != _READ_OF_SAMPLING and value != allowed:
                yield (
                    f"{section}.{item.name}: value {json.dumps(value)}; allowed with {kind}: {json.dumps(allowed)}, "
                    "because nothing reads it"
                )
