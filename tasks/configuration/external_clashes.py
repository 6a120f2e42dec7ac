"""Clashes of a trainer outside this project (`trainer.placement: external`) with other sections.

Such a trainer has a loss, an optimizer and a state of its own, so settings of ours are refused instead of ignored.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.data import SUBMITTED, DataConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import EXTERNAL, TrainerConfig

_PLACED = f"trainer.placement {EXTERNAL!r}"
# What decides which groups the trainer gets, and in which order.
_READ_OF_ALGORITHM = {
    "kind",
    "max_staleness",
    "micro_batch_order",
    "filter_groups",
    "filter_groups_budget",
    "filter_groups_reward",
}
# What a program that records groups reads, and what has a line of its own.
_READ_OF_TRAINER = {"placement", "fleet", "device", "micro_batch_tokens_max", "group_timeout_s"}
# What chooses rows of a source.
_OF_ROWS = ("subset", "split", "revision", "prompt_column", "limit", "from_", "pass_rate")


def is_external(document: Mapping[str, Any]) -> bool:
    """Whether a document of a configuration names a trainer outside this project."""
    trainer = document.get("trainer")
    return isinstance(trainer, Mapping) and trainer.get("placement") == EXTERNAL


def external_that_clash(config: Any) -> Iterator[str]:
    """A line about each field that cannot be, with what is allowed. config: the RunConfig."""
    if config.evaluation is not None and config.evaluation.data.source == SUBMITTED:
        yield f"evaluation.data.source: value {SUBMITTED!r}; allowed: prompts of its own, because no program gives them"
    if config.run.num_generations == 1 and config.data.source != SUBMITTED:
        yield f"run.num_generations: value 1; allowed without data.source {SUBMITTED!r}: at least 2, to be compared"
    if config.trainer.is_external:
        yield from _given_in_vain(config)
        yield from _trained_otherwise(config)
        if config.data.source == SUBMITTED:
            yield from _with_submitted_prompts(config.data, config.algorithm)
    elif config.data.source == SUBMITTED:
        yield f"data.source: value {SUBMITTED!r}; allowed only with {_PLACED}, whose program gives the prompts"


def _given_in_vain(config: Any) -> Iterator[str]:
    algorithm, evaluation = config.algorithm, config.evaluation
    if algorithm.learns_examples:
        yield f"algorithm.kind: value {algorithm.kind!r}; allowed with {_PLACED}: 'rl', because members generate"
    if config.lora is not None:
        yield f"lora: given; allowed with {_PLACED}: nothing, because the trainer publishes whole weights"
    if config.teacher is not None:
        yield f"teacher: given; allowed with {_PLACED}: nothing, because no train task asks a teacher"
    if config.run.from_optimizer:
        yield f"run.from_optimizer: value true; allowed with {_PLACED}: false, because the trainer has its own"
    if evaluation is not None and evaluation.rewards is None and not config.rewards:
        yield "evaluation.rewards: value null; allowed without rewards: at least one"


def _trained_otherwise(config: Any) -> Iterator[str]:
    sections: dict[str, tuple[Any, set[str]]] = {
        "algorithm": (AlgorithmConfig(), _READ_OF_ALGORITHM),
        "optimizer": (OptimizerConfig(), set()),
        "trainer": (TrainerConfig(), _READ_OF_TRAINER),
    }
    for section, (default, read) in sections.items():
        given = getattr(config, section)
        for item in fields(default):
            value, allowed = getattr(given, item.name), getattr(default, item.name)
            if item.name not in read and value != allowed:
                yield (
                    f"{section}.{item.name}: value {json.dumps(value, default=str)}; allowed with {_PLACED}: "
                    f"{json.dumps(allowed, default=str)}, because the trainer has its own"
                )


def _with_submitted_prompts(data: DataConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.filter_groups:
        yield f"algorithm.filter_groups: value true; allowed with data.source {SUBMITTED!r}: false"
    if data.replay is not None:
        yield f"data.replay: given; allowed with data.source {SUBMITTED!r}: null, because every group is the program's"
    default = DataConfig()
    for name in _OF_ROWS:
        value, allowed = getattr(data, name), getattr(default, name)
        if value != allowed:
            yield (
                f"data.{name.removesuffix('_')}: value {json.dumps(value)}; allowed with data.source {SUBMITTED!r}: "
                f"{json.dumps(allowed)}, because no rows are read"
            )
