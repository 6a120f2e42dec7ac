"""RunConfig: all settings of a run, read strictly from YAML or JSON before anything is created or paid for."""

import functools
import json
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from resources.documents import DocumentError, read_document
from resources.pools import PoolsConfig
from storage.digests import digest_of
from storage.errors import WrongInputError
from storage.journal.retention_config import RetentionConfig
from storage.records.records import RESPONSES_MAX
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.critic import CriticConfig
from tasks.configuration.data import DataConfig
from tasks.configuration.deleted_fields import ConstantDiffersError, with_constants, without_deleted
from tasks.configuration.evaluation import EvaluationConfig, is_inherited, with_inherited_sampling
from tasks.configuration.example_clashes import group_size, kinds_that_clash, missing_rewards, with_kind
from tasks.configuration.external_clashes import external_that_clash
from tasks.configuration.forecast import ForecastConfig
from tasks.configuration.lora import LoraConfig, adapters_that_clash
from tasks.configuration.older_form import in_older_form
from tasks.configuration.operational import DEFAULTS_SINCE, OPERATIONAL, YOUNG
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.origins import json_values, origins_that_clash, with_policy
from tasks.configuration.placement_clashes import needs_all_groups, placements_that_clash
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.pool_clashes import pools_that_clash
from tasks.configuration.problems import (
    given_problems,
    integers_restored,
    names,
    not_json,
    problems,
    unfilled,
    validated,
    with_unfilled,
)
from tasks.configuration.rewards import RewardConfig, reward_names
from tasks.configuration.rollout import OUR_ENGINES, RolloutConfig
from tasks.configuration.run_section import PolicyConfig, RunSection
from tasks.configuration.sampling import SamplingConfig
from tasks.configuration.teacher import TeacherConfig, teachers_that_clash
from tasks.configuration.tracking import TrackingConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.configuration.turns import TurnsConfig, rewards_without_environment

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

# Measured in simulation: cycles are 1.02 times as long as if training followed the rollout from its beginning, and the
# trainer's machines are held for 0.27 of a cycle instead of all of it.
PHASE_START_SHARE = 0.9


class ConfigError(WrongInputError):
    """The configuration is invalid: one line per problem, each with the path of its field."""

    def __init__(self, source: str, problems: list[str]) -> None:
        super().__init__(f"{source} is not a valid run configuration:\n" + "\n".join(f"  {line}" for line in problems))
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration; see docs/guide/configuration.md."""

    __pydantic_config__ = STRICT
    run: RunSection
    policy: PolicyConfig
    data: DataConfig
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = ()
    turns: TurnsConfig | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    lora: LoraConfig | None = None
    teacher: TeacherConfig | None = None
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    forecast: ForecastConfig = field(default_factory=ForecastConfig)
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    evaluation: EvaluationConfig | None = None

    def __post_init__(self) -> None:
        reward_names(self.rewards)
        problems_found = [
            *kinds_that_clash(self),
            *origins_that_clash(self),
            *teachers_that_clash(self),
            *_lengths_that_clash(self),
            *_groups_that_clash(self),
            *rewards_without_environment(self.turns, self.rewards, self.evaluation),
            *_machines_that_clash(self),
            *_crews_that_clash(self),
            *adapters_that_clash(self.lora, self.rollout.vllm.max_lora_rank),
            *pools_that_clash(self.pools, self.rollout, self.planning),
            *placements_that_clash(self.trainer, self.run.url, self.pools.train, self.planning, self.rewards),
            *external_that_clash(self),
        ]
        if problems_found:
            raise ValueError("\n".join(problems_found))

    @property
    def in_plan_order(self) -> bool:
        """Whether groups are trained in the order of the plan; a restarted trainer finds the same answer."""
        is_float32 = {self.rollout.dtype, self.trainer.dtype} == {"float32"}
        return self.algorithm.in_plan_order(exact_engine=is_float32 and self.rollout.engine in OUR_ENGINES)

    @property
    def phase_start_share(self) -> float:
        """The share of the groups that is recorded before the train phase begins, unless trainer.placement is "own".

        A trainer that stands has nothing else to do, so it begins with the first group.
        """
        if self.trainer.placement == "standing":
            return 0.0
        return 1.0 if needs_all_groups(self.algorithm) else PHASE_START_SHARE


def _lengths_that_clash(config: RunConfig) -> Iterator[str]:
    buffer, limit = config.algorithm.overlong_buffer_length, config.sampling.max_completion_length
    if buffer is not None and buffer > limit:
        yield (
            f"algorithm.overlong_buffer_length: value {buffer}; "
            f"allowed: null, or 1 to sampling.max_completion_length ({limit})"
        )
    samplings = [("sampling", config.sampling)]
    own = None if config.evaluation is None else config.evaluation.sampling
    if own is not None and own.max_completion_length != limit:
        samplings.append(("evaluation.sampling", own))
    context = config.rollout.context_length
    for section, sampling in samplings:
        if context is not None and sampling.max_completion_length >= context:
            yield (
                f"{section}.max_completion_length: value {sampling.max_completion_length}; allowed: less than "
                f"rollout.context_length ({context}), which also holds the prompt"
            )


def _groups_that_clash(config: RunConfig) -> Iterator[str]:
    parts, prompts = config.algorithm.num_mini_batches, config.run.num_prompts_per_step
    if parts > prompts:
        yield f"algorithm.num_mini_batches: value {parts}; allowed: 1 to run.num_prompts_per_step ({prompts})"
    deciding = config.algorithm.filter_groups_reward
    if deciding is not None and deciding not in (names := reward_names(config.rewards)):
        yield (
            f"algorithm.filter_groups_reward: value {deciding!r}; allowed: null, or the name of a reward: "
            f"{', '.join(map(repr, names))}"
        )
    budget = config.algorithm.filter_groups_budget if config.algorithm.filter_groups else 1
    responses = math.ceil(prompts * budget) * group_size(config.algorithm, config.run.num_generations)
    if responses > RESPONSES_MAX:
        yield (
            f"run.num_generations: value {config.run.num_generations}, {responses} responses in an iteration; "
            f"allowed: {RESPONSES_MAX}"
        )


def _machines_that_clash(config: RunConfig) -> Iterator[str]:
    gpus, processes = config.pools.train.gpus, config.trainer.nproc_per_node
    if gpus and processes > gpus:
        yield f"trainer.nproc_per_node: value {processes}; allowed: 1 to pools.train.gpus ({gpus}), one for each GPU"
    ranks, per_engine = config.trainer.nnodes * processes, config.rollout.vllm.tensor_parallel_size
    if config.planning.seeding == "auto" and ranks > 1 and per_engine > 1:
        yield (
            f"rollout.vllm.tensor_parallel_size: value {per_engine}; allowed with planning.seeding 'auto' and "
            f"{ranks} processes of the trainer: 1, because each generates on its own GPU"
        )
    if config.critic != CriticConfig() and not config.algorithm.estimator.needs_critic:
        yield (
            "critic: given; allowed with algorithm.advantage_estimator "
            f"{config.algorithm.advantage_estimator!r}: nothing, because there is no critic"
        )


def _crews_that_clash(config: RunConfig) -> Iterator[str]:
    planning = config.planning
    if config.rollout.crew == "iteration":
        return
    for field_name, value, allowed in (
        ("width", planning.width, "fixed"),
        ("objective", planning.objective, "makespan"),
        ("usd_per_iteration_max", planning.usd_per_iteration_max, None),
    ):
        if value != allowed:
            yield (
                f"planning.{field_name}: value {value!r}; allowed with rollout.crew 'standing': "
                f"{'null' if allowed is None else repr(allowed)}, because its machines stay until the last iteration"
            )


def load(path: str | Path) -> RunConfig:
    """Read a YAML or JSON file; raises ConfigError, which names the file and every wrong field."""
    try:
        document = read_document(Path(path))
    except DocumentError as error:
        raise ConfigError(str(path), [str(error)]) from None
    return parse(document, str(path))


def parse(document: object, source: str = "the configuration") -> RunConfig:
    """The RunConfig that a user's mapping describes; raises ConfigError."""
    given = _mapping(document, source)
    try:
        if unfit := given_problems(given):
            raise ConfigError(source, unfit)
        waiting, whole = list(unfilled(given)), integers_restored(given)
        parsed, wrong = _validated(whole)
    except RecursionError:
        raise ConfigError(source, ["it is nested too deeply"]) from None
    if parsed is None or waiting:
        raise ConfigError(source, with_unfilled(wrong, waiting))
    return parsed


def parse_held(document: object, source: str = "the configuration") -> RunConfig:
    """The RunConfig in a record of a run, without deleted fields; raises ConfigError.

    `parse` kept secrets out and filled every field in when the run began. The runs of some versions hold the floats
    that Flyte's console makes of integers.
    """
    try:
        held = integers_restored(without_deleted(_mapping(document, source)))
        parsed, wrong = (None, unfit) if (unfit := list(not_json(held))) else _validated(held)
    except ConstantDiffersError as error:
        raise ConfigError(source, [str(error)]) from None
    except RecursionError:
        raise ConfigError(source, ["it is nested too deeply"]) from None
    if parsed is None:
        raise ConfigError(source, wrong)
    return parsed


def _mapping(document: object, source: str) -> Mapping[str, Any]:
    if not isinstance(document, Mapping) or not document:
        what = "empty" if not document else f"a {type(document).__name__}"
        raise ConfigError(source, [f"it is {what}; allowed: a mapping with sections {', '.join(names(RunConfig))}"])
    return document


def _validated(document: Mapping[str, Any]) -> tuple[RunConfig | None, list[str]]:
    """The RunConfig, or None and what is wrong."""
    missing = missing_rewards(document)
    try:
        # Through JSON, so that lists become tuples.
        parsed = validated(_adapter(), json.dumps(with_kind(with_policy(with_inherited_sampling(document)))))
    except ValidationError as error:
        errors = [each for each in error.errors(include_url=False) if not is_inherited(each["loc"], document)]
        return None, [*problems(errors, RunConfig), *missing]
    return (None, missing) if missing else (parsed, [])


@functools.cache
def _adapter() -> TypeAdapter[RunConfig]:
    """The validator, built once: that takes 0.1 s, and each iteration of a chain parses its configuration."""
    return TypeAdapter(RunConfig)


def dump(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as JSON values; `parse` gives the same RunConfig back."""
    return json_values(config)


def identity(config: RunConfig) -> dict[str, Any]:
    """The part of the configuration that decides what is learned; equal in all iterations of a run."""
    resolved = _learned(config)
    for path, default in YOUNG.items():
        parent, name = _place(resolved, path)
        if parent is not None and parent[name] == default:
            del parent[name]
    return resolved


def changes(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """A line `field: a here, b there` for each setting in which the identities differ; [] if they are the same."""
    return differences(_learned(ours), _learned(theirs))


def _learned(config: RunConfig) -> dict[str, Any]:
    """The identity with every field, those too at which a younger field counts as absent."""
    resolved = in_older_form(dump(config))
    for path, operational in OPERATIONAL.items():
        *parents, section = path.split(".")
        parent = functools.reduce(operator.getitem, parents, resolved)
        if operational is None:
            del parent[section]
        elif parent is not None:
            parent[section] = _without(parent[section], operational)
    for path, (default, older) in DEFAULTS_SINCE.items():
        parent, name = _place(resolved, path)
        if parent[name] == default:
            parent[name] = older
    return with_constants(resolved)


def _place(settings: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The section that has a field, and the field's own name."""
    *parents, name = path.split(".")
    return functools.reduce(operator.getitem, parents, settings), name


def _without(section: Any, names: set[str]) -> Any:
    """A section, or each item of a list of sections, without these fields; None, which is no section, stays."""
    if section is None:
        return None
    if isinstance(section, list):
        return [_without(item, names) for item in section]
    return {name: value for name, value in section.items() if name not in names}


def digest(config: RunConfig) -> str:
    """32 hexadecimal digits that name the run's identity."""
    return _digest(identity(config))


def settings_digest(config: RunConfig) -> str:
    """12 hexadecimal digits that name all settings, with the settings that may change within a run."""
    return _digest(dump(config))[:12]


def _digest(settings: dict[str, Any]) -> str:
    return digest_of(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode())


def differences(ours: object, theirs: object, path: str = "") -> list[str]:
    """A line `field: a here, b there` for every leaf in which two documents differ; [] if they are equal."""
    a, b = _fields_of(ours), _fields_of(theirs)
    are_lists = isinstance(ours, list)
    if a is None or b is None or are_lists != isinstance(theirs, list) or (are_lists and len(a) != len(b)):
        here, there = (json.dumps(value, sort_keys=True) for value in (ours, theirs))
        return [] if here == there else [f"{path}: {here} here, {there} there"]
    found = []
    for name in sorted({*a, *b}):
        place = f"{path}.{name}".lstrip(".")
        if name in a and name in b:
            found += differences(a[name], b[name], place)
        else:
            here, there = (json.dumps(each[name]) if name in each else "nothing" for each in (a, b))
            found.append(f"{place}: {here} here, {there} there")
    return found


def _fields_of(value: object) -> Mapping[str, Any] | None:
    """A mapping, or a list as a mapping from its indices; None for a leaf."""
    if isinstance(value, list):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, Mapping) else None
