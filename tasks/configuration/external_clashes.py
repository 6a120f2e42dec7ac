"""Clashes of a trainer outside this project (`trainer.placement: external`) with other sections.

Such a trainer has a loss, an optimizer and a state of its own, so settings of ours are refused instead of ignored.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.data import SUBMITTED, DataConfig
from tasks.configuration.lora import LoraConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import EXTERNAL

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


def is_external(document: Mapping[str, Any]) -> bool:
    """Whether a document of a configuration names a trainer outside this project."""
    trainer = document.get("trainer")
    return isinstance(trainer, Mapping) and trainer.get("placement") == EXTERNAL


def external_that_clash(
    is_trained_outside: bool,
    data: DataConfig,
    algorithm: AlgorithmConfig,
    optimizer: OptimizerConfig,
    lora: LoraConfig | None,
) -> Iterator[str]:
    """A line about each field that cannot be, with what is allowed."""
    if not is_trained_outside:
        if data.source == SUBMITTED:
            yield f"data.source: value {SUBMITTED!r}; allowed only with {_PLACED}, whose program gives the prompts"
        return
    if algorithm.learns_examples:
        yield f"algorithm.kind: value {algorithm.kind!r}; allowed with {_PLACED}: 'rl', because members generate"
    if lora is not None:
        yield f"lora: given; allowed with {_PLACED}: nothing, because the trainer publishes whole weights"
    if algorithm.filter_groups and data.source == SUBMITTED:
        yield f"algorithm.filter_groups: value true; allowed with data.source {SUBMITTED!r}: false"
    for section, given, default, read in (
        ("algorithm", algorithm, AlgorithmConfig(), _READ_OF_ALGORITHM),
        ("optimizer", optimizer, OptimizerConfig(), set()),
    ):
        for item in fields(default):
            value, allowed = getattr(given, item.name), getattr(default, item.name)
            if item.name not in read and value != allowed:
                yield (
                    f"{section}.{item.name}: value {json.dumps(value, default=str)}; allowed with {_PLACED}: "
                    f"{json.dumps(allowed, default=str)}, because the trainer has its own"
                )
