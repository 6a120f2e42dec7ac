"""A scenario: all inputs of a simulated run, as strict values for a YAML file.

The parts are pools, the trainer's machines, the work, and the policy; planning is configured as in production.
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
from tasks.configuration.rollout import SEEDING_TTLS
from tasks.crew_model.ownership import CrewRules
from tasks.crew_model.step_time import StepTime
from tasks.forecasting.scorers import ScorersScenario

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Points = tuple[tuple[int, float], ...]
_AtLeast0 = Annotated[float, Field(ge=0)]
_Above0 = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


class ScenarioError(WrongInputError):
    """The scenario is invalid; the message has a line for each problem, with the path of the field."""


@dataclass(frozen=True, kw_only=True)
class AvailabilityScenario:
    """The availability of a pool's machines, by exactly one of a trace file, a random process, or counts.

    Attributes:
        path: file of a trace in a format of resources.spot_trace, from which as many places as the pool has are drawn.
        process: name of a process in resources.spot_trace.PROCESSES.
        counts: (second, machines from then on), seconds ascending; the last machine to come goes first.
        rate_factor: factor on the rate of losses; in a trace, the factor by which events are closer together.
        start_s: second of the trace, after the factor, at which the run begins; None: drawn. After its end the trace
            begins again, without a loss at the seam.
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
    """A pool of machines for generating, with one member of the crew on each.

    Attributes:
        name: name of the pool.
        interruptible: True for spot machines.
        count: most members.
        count_min: fewest members; the planner chooses a number from count_min to count.
        places: machines of the market for the pool, of which at most count are taken at a time; None: count.
        usd_per_h: price of one machine.
        gpus: GPUs of one machine, for GPU-seconds.
        responses_max: most responses decoded together.
        step_s: (batch, seconds of a decode step), as in StepTime.
        prefill_tokens_per_s: rate of reading prompts and prefixes, without decoding at the time.
        start_s: paid seconds until a process can start on a new machine: provisioning and image.
        process_s: seconds of starting pod and engine in every iteration, while the machine pulls the weights; 0 if
            engines persist.
        link_gbps: download rate of a machine.
        egress_usd_per_gb: price of the bytes that machines read.
        kept: True if machines stay between iterations, and are paid for; False if a machine goes when its member
            leaves, and the next iteration starts new machines.
        availability: availability of the machines; None: always.
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
    """The train phase of a run with the trainer's machines for the phase of each iteration only.

    Attributes:
        start_share: share of ended groups at which the phase is due.
        start_s: paid seconds from getting the machines until a process can load the model.
        publishes_beside: True if the machines go at the end of the step, because a host publishes from memory.
    """

    __pydantic_config__ = STRICT
    start_share: Annotated[float, Field(gt=0, le=1)]
    start_s: _AtLeast0 = 0.0
    publishes_beside: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainerScenario:
    """The trainer's machines, which are always available.

    engines: number of rollout engines on the machines, for seeding (RLBoost's N_resv); 0: no engine generates.
    usd_per_h, gpus: price and GPUs of all machines together.
    responses_max, step_s, prefill_tokens_per_s: figures of one engine, as in PoolScenario.
    process_s: seconds until the engines are ready, in every iteration with generating engines; 0 if engines persist.
    load_s: seconds from the end of generating, or from the start of a process, until the trainer can train.
    train_s_per_token: seconds per generated token. train_fixed_s: further seconds of a step: optimizer, publishing.
    control_s: seconds from published weights to the next plan, for conclusion and plan, without a process on any
        machine.
    waits: True if the trainer's process waits during the rollout; False if the process starts after the last response,
        as on one machine that runs all tasks in turn.
    replay_interval: iterations between checkpoints; a new process trains again from the last checkpoint on. 1: no
        replay.
    upload_gbps: highest rate of sending weights to all members together; None: unlimited, as from object storage.
    micro_batch_responses: ended responses in complete groups with which training continues, with streaming.
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
    """Response lengths in tokens, by quantiles, a file, or a log-normal distribution.

    quantiles: (quantile, tokens), both ascending, linear in between. path, column: a file of quantiles or of lengths,
        and the column or field with the tokens (tasks.forecasting.response_lengths).
    median, sigma: log-normal distribution; sigma is the deviation of the natural logarithm.
    cap: most tokens of a response.
    rho: correlation of the normal scores of two responses to a prompt, in any two epochs.
    drift: growth of median and tail with every iteration, as a share.
    epoch_change_tokens: standard deviation of the shift of a prompt's lengths from epoch to epoch.
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
    """The tools for which responses wait; tasks.forecasting.response_lengths draws the answers.

    Attributes:
        answers: mean number of answers in a response.
        answers_max: most answers in a response.
        answer_s: mean seconds from the end of a turn to the answer.
        sigma: deviation of the natural logarithm of the seconds.
        observation_tokens: tokens of every answer.
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

    prompt_tokens: tokens of every prompt. prompts_in_dataset: prompts of an epoch; None: no prompt recurs. tools: None:
    no response waits for a tool.
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
    """The rules of the run. Besides `planning` and the intervals, fields are switches for comparisons with production.

    planning: section `planning`, as in production.
    resume: where a lost response begins again: at the last flush ("token"), or at its prompt ("response"). A response
        handed over by a live member keeps its tokens in either case.
    balance: True if members without work also take responses of live members, not only lost and unclaimed responses.
    streaming: True if training begins with the first complete groups; False: after all responses. in_order: training
        takes groups by number. keep_order: members begin groups by number, as with dynamic sampling.
    crew: as in tasks.configuration.rollout.RolloutConfig. A crew of one iteration works on one iteration at a time; a
        member of a standing crew goes on with the next iteration as soon as a plan exists.
    max_staleness: iterations generated ahead of training, with weights as many versions behind.
    seeding_memory: True if the controller remembers seeding times by number of members.
    plans_tools: True if the planner knows the seconds of waiting for tools.
    predictor: the planner's knowledge of lengths: nothing; the truth; the prompt's lengths in the last epoch; or the
        true lengths in a wrong order that keeps the share `recall` of the longest fifth of the groups in the fifth.
    flush_interval_s, heartbeat_interval_s, claim_ttl_s: as in tasks.configuration.rollout.RolloutConfig.
    put_usd, get_usd: dollars per request to the store.
    weights_bytes: bytes of a full pull. weights_delta_bytes: bytes of a pull by a machine with the previous version;
        None: as a full pull.
    transfer: "pull": each member begins after its own pull; "barrier": all members begin after the last pull.
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
    def seeding_after_s(self) -> float:
        """Seconds without a living member until the trainer's machines generate again."""
        return SEEDING_TTLS * self.claim_ttl_s

    @property
    def crew_rules(self) -> CrewRules:
        """The rules of the members of a crew."""
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
    """A whole scenario. scorers: None: no pool scores. sources: of each figure by its field's path, for readers."""

    __pydantic_config__ = STRICT
    name: str
    pools: tuple[PoolScenario, ...] = ()
    trainer: TrainerScenario
    work: WorkScenario
    policy: Policy
    scorers: ScorersScenario | None = None
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
    """The scenario in a YAML or JSON file; raises ScenarioError with the file and every wrong field."""
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
