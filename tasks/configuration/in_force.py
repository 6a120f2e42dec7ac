"""The configuration in force as a YAML file that people read: the fields of a first run first, the others below.

docs/guide/configuration.md opens with the same fields.
"""

from collections.abc import Iterator
from typing import Any

import yaml

# By section, in the order in which they are shown; None: the whole section.
ESSENTIAL: dict[str, tuple[str, ...] | None] = {
    "run": ("url", "num_prompts_per_step", "num_generations"),
    "policy": ("path",),
    "data": ("source", "prompt_column"),
    "rewards": None,
    "sampling": ("max_completion_length",),
    "optimizer": ("learning_rate",),
    "algorithm": ("advantage_estimator", "policy_loss", "kl_coef"),
    "lora": ("rank",),
    "rollout": ("engine", "dtype", "context_length", "max_responses_in_flight"),
    "trainer": ("dtype", "gradient_checkpointing", "micro_batch_tokens_max"),
    "pools": ("rollout", "train"),
}
EXPERT = "# the rest of {section}, for experts"


def in_force(document: dict[str, Any]) -> str:
    """A resolved configuration (`run_config.dump`) as YAML, which reads back as the same."""
    order = [*ESSENTIAL, *(section for section in document if section not in ESSENTIAL)]
    lines = [line for section in order for line in _section(section, document[section])]
    return "\n".join(lines) + "\n"


def _section(section: str, value: Any) -> Iterator[str]:
    names = ESSENTIAL.get(section)
    if names is None or not isinstance(value, dict):
        yield from _lines({section: value})
        return
    yield f"{section}:"
    yield from ("  " + line for line in _lines({name: value[name] for name in names}))
    rest = {name: held for name, held in value.items() if name not in names}
    if rest:
        yield "  " + EXPERT.format(section=section)
        yield from ("  " + line for line in _lines(rest))


def _lines(document: dict[str, Any]) -> list[str]:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1_000_000).splitlines()
