"""A scenario: everything that a simulated run depends on, as strict values that a YAML file can hold.

It has pools, the trainer's machines, the work, and the policy; planning is configured as in production.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from resources.documents import DocumentError, read_document
from resources.pools import POOL_NAME
from resources.prices import GET_USD, PUT_USD
from resources.spot_trace import PROCESSES
from storage.errors import WrongInputError
from storage.records.records import TRAIN_POOL
from tasks.configuration.planning import PlanningConfig
from tasks.crew_model.ownership import CrewRules
from tasks.crew_model.step_time import StepTime

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Points = tuple[tuple[int, float], ...]
_AtLeast0 = Annotated[float, Field(ge=0)]
_Above0 = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


class ScenarioError(WrongInputError):
    """The scenario is invalid: one line per problem, each with the path of its field."""


@dataclass(frozen=True, kw_only=True)
class AvailabilityScenario:
    """When a pool's machines are available: exactly one of a trace file, a process that draws one, or counts.

    path: a trace in one of the formats of resources.spot_trace; as many of its places are drawn as the pool's count.
    process: the name of one of resources.spot_trace.PROCESSES.
    counts: (second, machines from then on), seconds ascending; the last machine to come goes first.
    rate_factor: factor on the rate of losses; with a file, all its events are that many times closer together.
    start_s: second of the trace, after the factor, at which the run begins; None: drawn. Behind its end the trace
        begins again, without a loss where it wraps around.
    """

    __pydantic_config__ = STRICT
    path: str | None = None
    process: str | None = None
    counts: Annotated[tuple[tuple[_AtLeast0, Annotated[int, Field(ge=0)]], ...], Field(min_length=1)] | None = None
    rate_factor: _Above0 = 1.0
    start_s: _AtLeast0 | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("path", "process", "counts") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"path, process, counts: value {given or 'none'} given; allowed: exactly one of them")
        if self.process is not None and self.process not in PROCESSES:
            raise ValueError(f"process: value {self.process!r}; allowed: {', '.join(PROCESSES)}")
        if self.counts is not None and any(b[0] <= a[0] for a, b in pairwise(self.counts)):
            raise ValueError(f"counts: seconds {[at_s for at_s, _ in self.counts]}; allowed: ascending")


@dataclass(frozen=True, kw_only=True)
class PoolScenario:
    """A pool of machines that generate, one member of the crew each.

    count_min, count: the least and the most members; the planner chooses between them. places: the machines that the
        market has for the pool, of which at most count are taken at a time; None: count.
    usd_per_h: price of one machine. gpus: GPUs of one machine, for GPU-seconds.
    responses_max: the most responses decoded together. step_s: (batch, seconds of a decode step), as in StepTime.
    prefill_tokens_per_s: rate of prompts and prefixes; decoding stands still meanwhile.
    start_s: seconds until a process can start on a new machine: provisioning and image. They are paid for.
    process_s: seconds in every iteration until a member could work if it had the weights, which it pulls meanwhile: pod
        and engine; 0 if engines persist.
    link_gbps: a machine's download rate. egress_usd_per_gb: price of what it reads.
    kept: its machines stay between iterations, and are paid for; else a machine goes when its member leaves, and the
        next iteration starts new ones.
    availability: None: always.
    """

    __pydantic_config__ = STRICT
    name: Annotated[str, Field(pattern=POOL_NAME)] = "rollout"
    interruptible: bool = True
    count: Annotated[int, Field(ge=0)]
    count_min: Annotated[int, Field(ge=0)] = 0
    places: Annotated[int, Field(ge=0)] | None = None
    usd_per_h: _AtLeast0
    gpus: _AtLeast0 = 1.0
    responses_max: Annotated[int, Field(ge=1)]
    step_s: Points
    prefill_tokens_per_s: _Above0
    start_s: _AtLeast0 = 0.0
    process_s: _AtLeast0 = 0.0
    link_gbps: _Above0
    egress_usd_per_gb: _AtLeast0 = 0.0
    kept: bool = True
    availability: AvailabilityScenario | None = None

    def __post_init__(self) -> None:
        if self.count_min > self.count:
            raise ValueError(f"count_min: value {self.count_min}; allowed: 0 to count ({self.count})")
        if self.places is not None and self.places < self.count:
            raise ValueError(f"places: value {self.places}; allowed: null, or at least count ({self.count})")
        if self.name == TRAIN_POOL:
            raise ValueError(f"name: value {self.name!r}; allowed: another, that is what the trainer's machines are")
        StepTime(self.step_s)

    @property
    def step_time(self) -> StepTime:
        return StepTime(self.step_s)


@dataclass(frozen=True, kw_only=True)
class PhaseScenario:
    """How the run gets the trainer's machines if it has them for the train phase of each iteration only.

    start_share: the phase is due when this share of the groups has ended. start_s: seconds from getting the machines to
        a process that can load the model; they are paid for.
    publishes_beside: the machines go as soon as the step is taken, because a host publishes from its memory.
    """

    __pydantic_config__ = STRICT
    start_share: Annotated[float, Field(gt=0, le=1)]
    start_s: _AtLeast0 = 0.0
    publishes_beside: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainerScenario:
    """The trainer's machines, which are always available.

    engines: rollout engines that fit on them, for seeding (RLBoost's N_resv); 0: they do not generate.
    usd_per_h, gpus: of all of them together.
    responses_max, step_s, prefill_tokens_per_s: of one of the engines.
    process_s: seconds until the engines are ready, in every iteration in which they generate; 0 if they persist.
    load_s: seconds from the end of generating, or from its beginning, until it holds the model and can train.
    train_s_per_token: seconds per generated token. train_fixed_s: further seconds of a step: optimizer, publishing.
    control_s: from published weights to the next plan: conclusion and plan. No process is on any machine then.
    waits: whether its process waits while responses are generated; else it starts when all have ended, as when one
        machine runs all tasks in turn.
    replay_interval: a process of its own trains again what was trained since the last multiple of so many iterations,
        because only then a checkpoint is stored; 1: nothing.
    upload_gbps: the highest rate at which weights reach all members together; None: unlimited, as from object storage.
    micro_batch_responses: with streaming, training continues when this many responses have ended in complete groups.
    phase: None: the machines are the run's own, and paid for all the time.
    """

    __pydantic_config__ = STRICT
    engines: Annotated[int, Field(ge=0)]
    usd_per_h: _AtLeast0
    gpus: _AtLeast0
    responses_max: Annotated[int, Field(ge=1)]
    step_s: Points
    prefill_tokens_per_s: _Above0
    process_s: _AtLeast0 = 0.0
    load_s: _AtLeast0 = 0.0
    train_s_per_token: _AtLeast0
    train_fixed_s: _AtLeast0 = 0.0
    control_s: _AtLeast0 = 0.0
    waits: bool = True
    replay_interval: Annotated[int, Field(ge=1)] = 1
    upload_gbps: _Above0 | None = None
    micro_batch_responses: Annotated[int, Field(ge=1)] = 16
    phase: PhaseScenario | None = None

    def __post_init__(self) -> None:
        if self.phase is not None and self.engines:
            raise ValueError(f"engines: value {self.engines}; allowed with phase: 0, they are there to train only")
        StepTime(self.step_s)

    @property
    def step_time(self) -> StepTime:
        return StepTime(self.step_s)


@dataclass(frozen=True, kw_only=True)
class LengthsScenario:
    """Response lengths in tokens: quantiles, a file of them, or a log-normal distribution.

    quantiles: (quantile, tokens), both ascending, linear in between. path, column: a file of quantiles or of lengths,
        and the column or field that holds them (tasks.forecasting.response_lengths).
    median, sigma: the log-normal distribution; sigma is that of the natural logarithm.
    cap: longer responses end there.
    rho: correlation of the normal scores of two responses to one prompt, in the same epoch or another.
    drift: median and tail grow by this share with every iteration.
    epoch_change_tokens: standard deviation of the shift of a prompt's lengths from one epoch to the next.
    """

    __pydantic_config__ = STRICT
    quantiles: Annotated[tuple[tuple[_Share, _AtLeast0], ...], Field(min_length=2)] | None = None
    path: str | None = None
    column: str | None = None
    median: _Above0 | None = None
    sigma: _AtLeast0 | None = None
    cap: Annotated[int, Field(ge=1)]
    rho: _Share = 0.5
    drift: Annotated[float, Field(gt=-1, lt=10)] = 0.0
    epoch_change_tokens: _AtLeast0 = 0.0

    def __post_init__(self) -> None:
        given = [name for name in ("quantiles", "path", "median") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"quantiles, path, median: value {given or 'none'} given; allowed: exactly one of them")
        if (self.median is None) != (self.sigma is None) or (self.path is None) != (self.column is None):
            raise ValueError("sigma, column: one is missing or too much; allowed: median with sigma, path with column")
        if self.quantiles is not None and any(b[0] <= a[0] or b[1] < a[1] for a, b in pairwise(self.quantiles)):
            raise ValueError("quantiles: they do not ascend; allowed: quantiles ascending, tokens not descending")


@dataclass(frozen=True, kw_only=True)
class ToolsScenario:
    """The tools for which responses wait, as tasks.forecasting.tool_answers draws it.

    answers: mean number of answers in a response. answers_max: the most. answer_s: mean seconds from the end of a turn
    to its answer; sigma: that of the natural logarithm. observation_tokens: of every answer.
    """

    __pydantic_config__ = STRICT
    answers: _AtLeast0
    answers_max: Annotated[int, Field(ge=0)] = 10_000
    answer_s: _AtLeast0
    sigma: Annotated[float, Field(ge=0, le=5)] = 1.0
    observation_tokens: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, kw_only=True)
class WorkScenario:
    """The work: num_prompts_per_step groups of num_generations responses in each of `iterations`.

    prompt_tokens: of every prompt. prompts_in_dataset: prompts until the next epoch begins; None: no prompt recurs.
    tools: None: no response waits for any.
    """

    __pydantic_config__ = STRICT
    num_prompts_per_step: Annotated[int, Field(ge=1)]
    num_generations: Annotated[int, Field(ge=1)]
    prompt_tokens: Annotated[int, Field(ge=1)]
    prompts_in_dataset: Annotated[int, Field(ge=1)] | None = None
    lengths: LengthsScenario
    tools: ToolsScenario | None = None
    iterations: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        prompts = self.prompts_in_dataset
        if prompts is not None and prompts < self.num_prompts_per_step:
            raise ValueError(
                f"prompts_in_dataset: value {prompts}; allowed: null, or at least num_prompts_per_step "
                f"({self.num_prompts_per_step})"
            )

    @property
    def num_responses(self) -> int:
        return self.num_prompts_per_step * self.num_generations


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How decisions are made. All but `planning` and the intervals are switches for comparisons that production lacks.

    planning: as production plans.
    resume: where a lost response begins again: at the last flush ("token"), or at its prompt ("response"). A response
        that a living member hands on keeps its tokens in either case.
    balance: members without work also take from living ones; lost and unclaimed responses they always take.
    streaming: the trainer begins with the first complete groups; without it, when all responses have ended. in_order:
        it takes groups in the order of their numbers. keep_order: members begin them in that order, as with dynamic
        sampling.
    crew: as in tasks.configuration.rollout.RolloutConfig. A crew that is started for each iteration works on one
        iteration at a time; a member of a standing one goes on with the next as soon as that is planned.
    max_staleness: iterations that are generated while one is trained, with weights so many versions behind.
    seeding_memory: the controller remembers seeding times by number of members.
    plans_tools: the planner is told for how long responses wait for tools.
    predictor: what the planner is told of lengths: nothing; the truth; the prompt's lengths in the last epoch; or the
        truth in a wrong order, in which the share `recall` of the longest fifth of the groups is still in it.
    flush_interval_s, heartbeat_interval_s, claim_ttl_s: as in tasks.configuration.sampling.RolloutConfig.
    put_usd, get_usd: dollars per request to the store.
    weights_bytes: of a full pull. weights_delta_bytes: of a pull by a machine that has the version before; None: full.
    transfer: each member begins after its own pull ("pull"), or all after the last one ("barrier").
    """

    __pydantic_config__ = STRICT
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    resume: Literal["token", "response"] = "token"
    balance: bool = True
    streaming: bool = True
    in_order: bool = False
    keep_order: bool = False
    crew: Literal["iteration", "standing"] = "iteration"
    max_staleness: Annotated[int, Field(ge=0)] = 0
    seeding_memory: bool = True
    plans_tools: bool = True
    predictor: Literal["none", "oracle", "history", "recall"] = "none"
    recall: _Share = 0.87
    flush_interval_s: _Above0 = 5.0
    heartbeat_interval_s: _Above0 = 5.0
    claim_ttl_s: _Above0 = 30.0
    put_usd: _AtLeast0 = PUT_USD
    get_usd: _AtLeast0 = GET_USD
    weights_bytes: _AtLeast0
    weights_delta_bytes: _AtLeast0 | None = None
    transfer: Literal["pull", "barrier"] = "pull"

    @property
    def crew_rules(self) -> CrewRules:
        """The part by which the members of a crew work."""
        return CrewRules(
            flush_interval_s=self.flush_interval_s,
            heartbeat_interval_s=self.heartbeat_interval_s,
            claim_ttl_s=self.claim_ttl_s,
            objective=self.planning.objective,
            cut_share=self.planning.cut_share,
            balance=self.balance,
            resume=self.resume,
        )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A whole scenario. sources: where figures come from, by the path of their field; for people only."""

    __pydantic_config__ = STRICT
    name: str
    pools: tuple[PoolScenario, ...] = ()
    trainer: TrainerScenario
    work: WorkScenario
    policy: Policy
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ValueError(f"pools: names {names}; allowed: each once")
        crew = sum(pool.count for pool in self.pools)
        seeding = self.policy.planning.seeding
        if not crew and not (self.trainer.engines and seeding == "auto"):
            raise ValueError(
                f"pools: value no members, with trainer.engines {self.trainer.engines} and policy.planning.seeding "
                f"{seeding!r}; allowed: members, or engines that generate (seeding 'auto')"
            )


_ADAPTER = TypeAdapter(Scenario)


def load(path: str | Path) -> Scenario:
    """The scenario in a YAML or JSON file; raises ScenarioError, which names the file and every wrong field."""
    try:
        document = read_document(Path(path))
    except DocumentError as error:
        raise ScenarioError(f"{path}: {error}") from None
    return parse(document, str(path))


def parse(document: object, source: str = "the scenario") -> Scenario:
    """The scenario that a mapping describes; raises ScenarioError."""
    if not isinstance(document, Mapping):
        raise ScenarioError(f"{source}: value of type {type(document).__name__}; allowed: a mapping")
    try:
        # Through JSON, so that lists become tuples.
        return _ADAPTER.validate_json(json.dumps(document))
    except ValidationError as error:
        problems = [_problem(details) for details in error.errors(include_url=False)]
    except (TypeError, ValueError) as error:
        problems = [str(error)]
    raise ScenarioError(f"{source} is not a valid scenario:\n" + "\n".join(f"  {line}" for line in problems))


def _problem(details: Any) -> str:
    path = ".".join(str(part) for part in details["loc"]) or "the document"
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "value_error":
        return f"{path}: {message}"
    if details["type"].startswith(("missing", "unexpected", "extra")):
        return f"{path}: {message[:1].lower()}{message[1:]}"
    return f"{path}: value {details['input']!r:.80}; allowed: {message.removeprefix('Input should be ')}"
