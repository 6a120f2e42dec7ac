"""The section `evaluation`: prompts, sampling, and the interval.

Imports no reward function and no reader. `settings_digest` names the settings that decide the outcome.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from storage.digests import digest_of
from tasks.configuration.data import OPERATIONAL as OPERATIONAL_OF_DATA
from tasks.configuration.data import YOUNG as YOUNG_OF_DATA
from tasks.configuration.data import DataConfig
from tasks.configuration.deleted_fields import with_constants
from tasks.configuration.older_form import data_in_older_form, reward_in_older_form
from tasks.configuration.origins import json_values
from tasks.configuration.rewards import OPERATIONAL, RewardConfig, reward_names
from tasks.configuration.sampling import YOUNG as YOUNG_OF_SAMPLING
from tasks.configuration.sampling import SamplingConfig

# A response is correct if its reward is at least this.
PASS_THRESHOLD = 1.0
# Of the sampling noise, the same for every weight version.
SEED = 0
# The constants in the place of deleted fields, by path, that the settings of every evaluation name: an evaluation made
# with these values is found.
_CONSTANTS: Mapping[str, object] = MappingProxyType(
    {
        "data.arithmetic.base": 10,
        "data.id_column": None,
        "num_prompts": None,
        "pass_threshold": PASS_THRESHOLD,
        "rewards.*.max_length": None,
        "seed": SEED,
    }
)
NO_MODELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The settings of evaluation; none of them changes what is learned.

    Attributes:
        data: The held-out prompts.
        rewards: None: the run's rewards.
        sampling: For the evaluation alone; temperature 0 is greedy. A document's fields override those of the run's
            section `sampling` (`with_inherited_sampling`).
        num_generations: Responses per prompt, the n of mean@n.
        interval: Training evaluates every weight version that this divides; 0: only `workflows/evaluation.py`
            evaluates.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    data: DataConfig
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    num_generations: Annotated[int, Field(ge=1)] = 1
    interval: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.rewards is not None:
            reward_names(self.rewards)
        if self.sampling.temperature == 0 and self.num_generations > 1:
            raise ValueError(
                f"num_generations: value {self.num_generations}; allowed with sampling.temperature 0: 1, because all "
                "responses to a prompt would be the same"
            )

    @property
    def k(self) -> tuple[int, ...]:
        """The values of k in pass@k: the powers of two below num_generations, and num_generations itself."""
        below = (self.num_generations - 1).bit_length()
        return (*(1 << power for power in range(below)), self.num_generations)

    def is_due(self, version: int) -> bool:
        """Whether training evaluates this weight version."""
        return self.interval > 0 and version % self.interval == 0


def with_inherited_sampling(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's document in which `evaluation.sampling` has the fields of `sampling` that it does not give itself."""
    evaluation, sampling = document.get("evaluation"), document.get("sampling")
    if not isinstance(evaluation, Mapping) or not isinstance(sampling, Mapping):
        return document
    own = evaluation.get("sampling", {})
    if not isinstance(own, Mapping):
        return document
    return {**document, "evaluation": {**evaluation, "sampling": {**sampling, **own}}}


def is_inherited(location: Sequence[object], document: Mapping[str, Any]) -> bool:
    """Whether a field of the document with inherited fields is one that the document itself does not have."""
    if tuple(location[:2]) != ("evaluation", "sampling") or len(location) == 2:
        return False
    return location[2] not in document["evaluation"].get("sampling", {})


def settings(
    evaluation: EvaluationConfig, rewards: Sequence[RewardConfig], models: Mapping[str, str] = NO_MODELS
) -> dict[str, Any]:
    """The settings that decide the outcome of an evaluation, as JSON values.

    rewards: the run's. models: a content digest for each reward model's name; it replaces the path in the
    configuration. A setting that is younger than the format counts only where set, so that an older evaluation is
    found.
    """
    resolved = json_values(evaluation)
    resolved["data"] = data_in_older_form(resolved["data"])
    resolved["k"] = list(evaluation.k)
    young = {"data": {**YOUNG_OF_DATA, "subset": None, "revision": None}, "sampling": YOUNG_OF_SAMPLING}
    for section, defaults in young.items():
        for name, default in defaults.items():
            if resolved[section][name] == default:
                del resolved[section][name]
    for name in OPERATIONAL_OF_DATA:
        del resolved["data"][name]
    decisive = rewards if evaluation.rewards is None else evaluation.rewards
    resolved["rewards"] = [
        _deciding(reward, models.get(name)) for name, reward in zip(reward_names(decisive), decisive, strict=True)
    ]
    del resolved["interval"]
    return with_constants(resolved, _CONSTANTS)


def _deciding(reward: RewardConfig, content: str | None) -> dict[str, Any]:
    deciding = {name: value for name, value in json_values(reward).items() if name not in OPERATIONAL}
    return reward_in_older_form(deciding) | {"model": content}


def settings_digest(resolved: dict[str, Any]) -> str:
    """32 hexadecimal digits that name `settings`."""
    canonical = json.dumps(resolved, sort_keys=True, separators=(",", ":"))
    return digest_of(canonical.encode())
