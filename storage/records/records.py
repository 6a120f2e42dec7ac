"""The small JSON objects of a run as frozen dataclasses, and their strict codec (docs/format.md section 3).

A record is refused under another key, with unknown fields and wrong types. Those created once carry a nonce.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import ConfigDict, Field

from storage.records import canonical
from storage.records.canonical import unwrap, wrap
from storage.records.draft_totals import DraftTotals
from storage.records.lineage import PromptsOrigin, ReplayedGroup, VersionOrigin
from storage.records.planning_records import DecisionRecord, LengthsRecord, PoolObservation, SeedingRecord
from storage.records.sources import HubSource
from storage.stores.store import ObjectStore
from storage.stores.store import commit as commit_bytes

# The pools of members that joined without a slot of the plan, of those on the trainer's machine, and of plan tasks.
JOINED_POOL, TRAIN_POOL, CONTROL_POOL = "joined", "train", "control"
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=True)
RESPONSES_MAX = 1 << 20  # readers hold something for each response of a plan


class AnyRecord(Protocol):
    """A dataclass that is an object of its own in the store. KIND is its name in the envelope."""

    KIND: ClassVar[str]


Record = TypeVar("Record", bound=AnyRecord)


def nonce() -> str:
    """A random name that lets a writer recognise its own record."""
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and read. Log-probs are under softmax(logits / temperature), before top_p, top_k."""

    __pydantic_config__ = STRICT
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_completion_length: int = 1024
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: Annotated[bool, Field(exclude_if=lambda skips: skips)] = True


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """run.json: what a run is.

    Attributes:
        config: the resolved RunConfig.
        digest: digest of the fields of `config` that must not change.
        model_files: digest of each file below `model/`, by name.
        sources: repositories and commits of the hub, by use; left out if empty, as in records of old runs.
        origin, prompts_origin: the version of another run with which this run begins, and what is known of its prompts
            from another run; left out without one.
    """

    KIND: ClassVar[str] = "run"
    __pydantic_config__ = STRICT
    config: dict[str, Any]
    digest: str
    vocab_size: int
    model_files: dict[str, str]
    sources: Annotated[dict[str, HubSource], Field(exclude_if=lambda held: not held)] = field(default_factory=dict)
    origin: Annotated[VersionOrigin | None, Field(exclude_if=lambda held: held is None)] = None
    prompts_origin: Annotated[PromptsOrigin | None, Field(exclude_if=lambda held: held is None)] = None
    created_at_s: float
    nonce: str = field(default_factory=nonce)


@dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """A slot of the plan and its first assignment.

    Attributes:
        pool: TRAIN_POOL for a member on the trainer's machine, which generates until `seeding.seeding_s` have passed.
        groups: numbers of the groups, in starting order.
        batch_max: largest number of responses that the member decodes together during this assignment; None: the limit
            of its engine.
    """

    __pydantic_config__ = STRICT
    slot: int
    pool: str
    groups: tuple[int, ...]
    batch_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """plan.json: the facts of an iteration that are fixed before its rollout starts.

    Response r is sample r % num_generations of group r // num_generations. Unit u of the claims holds the responses of
    the groups in slots[u].

    Attributes:
        groups_wanted: number of groups with unequal rewards to train, by ascending group number, with no group after
            the last; None: train all groups.
        weights_url: the place of weights and model files relative to this run: None is the run itself, "../.." the run
            whose evaluation this is.
        tools: schemas of the tools that prompts describe; left out if empty.
        prompts_per_epoch: size of the data set, by which members that draft find earlier responses; left out if 0.
        lengths, seeding, decisions: expectations and decisions of the planner; None or empty without a planner.
        counted_from: iterations of other runs behind version 0 (`VersionOrigin`); left out if 0.
        replayed: the sources of the last groups, whose responses other runs have stored; left out if empty.
    """

    KIND: ClassVar[str] = "plan"
    __pydantic_config__ = STRICT
    iteration: int
    weight_version: int
    run_seed: int
    num_generations: int
    prompts_key: str
    first_prompt: int
    slots: tuple[SlotPlan, ...]
    sampling: SamplingParams
    config: dict[str, Any]
    created_at_s: float
    tools: Annotated[tuple[dict[str, Any], ...], Field(exclude_if=lambda held: not held)] = ()
    prompts_per_epoch: Annotated[int, Field(ge=0, exclude_if=lambda number: not number)] = 0
    groups_wanted: int | None = None
    weights_url: Literal["../.."] | None = None
    lengths: LengthsRecord | None = None
    seeding: SeedingRecord | None = None
    decisions: tuple[DecisionRecord, ...] = ()
    counted_from: Annotated[int, Field(ge=0, exclude_if=lambda number: not number)] = 0
    replayed: Annotated[tuple[ReplayedGroup, ...], Field(exclude_if=lambda held: not held)] = ()
    nonce: str = field(default_factory=nonce)

    def __post_init__(self) -> None:
        if self.num_generations < 1 or self.num_responses > RESPONSES_MAX:
            allowed = f"allowed: 1 to {RESPONSES_MAX} responses"
            raise ValueError(f"num_generations: value {self.num_generations} with {self.num_groups} groups; {allowed}")

    @property
    def counted(self) -> int:
        """The number of the iteration from which noise and seeds follow, and a critic's warm-up."""
        return self.counted_from + self.iteration

    @property
    def num_groups(self) -> int:
        return sum(len(slot.groups) for slot in self.slots)

    @property
    def num_responses(self) -> int:
        return self.num_groups * self.num_generations

    @property
    def is_graded(self) -> bool:
        """Whether responses get rewards; without any, 0 stands for the reward in records."""
        return self.is_sampled and (self.weights_url is not None or self.config.get("rewards") != [])

    @property
    def is_sampled(self) -> bool:
        """Whether a policy samples the responses; examples come from a data set or from other runs."""
        return self.weights_url is not None or bool(self.config.get("algorithm", {}).get("kind", "rl") == "rl")

    @property
    def crew_slots(self) -> tuple[SlotPlan, ...]:
        """The slots with work, without the trainer's and the plan task's."""
        return tuple(slot for slot in self.slots if slot.groups and slot.pool not in (TRAIN_POOL, CONTROL_POOL))

    def responses_of(self, unit: int) -> tuple[int, ...]:
        """The responses of a claim unit, in starting order."""
        g = self.num_generations
        return tuple(group * g + sample for group in self.slots[unit].groups for sample in range(g))


@dataclass(frozen=True, kw_only=True)
class SettingsRecord:
    """The name and the changeable settings of the execution that works on an iteration now.

    Attributes:
        config: devices, limits and intervals alone, which may be changed after a failure; the rest is the run's.
    """

    KIND: ClassVar[str] = "settings"
    __pydantic_config__ = STRICT
    config: dict[str, Any]
    execution: str = ""
    ends_execution: bool = False  # it plans none after this one, so a checkpoint is stored whatever the interval


@dataclass(frozen=True, kw_only=True)
class ClaimRecord:
    """A claim: `incarnation` takes responses of a unit, and becomes the only incarnation that may extend them.

    Attributes:
        responses: the responses taken; None: all responses of the unit without an owner or with an owner in `sealed`.
        sealed: maps each earlier owner to the last of its shards that counts for the responses taken (-1: none). The
            new owner continues from the end of the sealed shards.
    """

    KIND: ClassVar[str] = "claim"
    __pydantic_config__ = STRICT
    unit: int
    epoch: int
    incarnation: str
    slot: int
    responses: tuple[int, ...] | None
    sealed: dict[str, int]
    nonce: str = field(default_factory=nonce)


@dataclass(frozen=True, kw_only=True)
class ClosedRecord:
    """closed.json: no further token of this iteration will be used; members stop."""

    KIND: ClassVar[str] = "closed"
    __pydantic_config__ = STRICT
    iteration: int
    reason: str
    nonce: str = field(default_factory=nonce)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a response's lineage: rows of `epoch` by `incarnation`, in its shards up to `last_sequence`."""

    __pydantic_config__ = STRICT
    epoch: int
    incarnation: str
    last_sequence: int


@dataclass(frozen=True, kw_only=True)
class GradedResponse:
    """A response as the trainer used it: the place and number of its tokens, and its rewards by function.

    A "failed" response lost its environment. Neither reward functions nor training use a failed response: `reward` is
    None, `rewards` empty.

    Attributes:
        length: number of all tokens after the prompt.
        policy_length: number of tokens that the policy sampled; equal to `length` without observations.
    """

    __pydantic_config__ = STRICT
    response: int
    length: int
    policy_length: int
    finish_reason: Literal["stop", "length", "failed"]
    lineage: tuple[Span, ...]
    reward: float | None
    rewards: dict[str, float | None]

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.finish_reason == "failed"):
            raise ValueError(f"reward: value {self.reward} of a response with finish_reason {self.finish_reason!r}")
        if self.policy_length > self.length:
            raise ValueError(f"policy_length: value {self.policy_length}; allowed: at most the length {self.length}")

    def deciding(self, plan: PlanRecord) -> float | None:
        """The value by which the plan filters groups: of algorithm.filter_groups_reward, or else the reward."""
        function = plan.config.get("algorithm", {}).get("filter_groups_reward")
        return self.reward if function is None else self.rewards[function]


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """batches/<k>: the responses of one micro-batch, recorded before use, for a restarted trainer to replay.

    Attributes:
        reward_errors: why reward functions failed; for people.
        filtered: responses of groups that are not trained, because all rewards of the group are equal.
        given_up: why built-in verifiers stopped at an answer; for people, left out if empty.
    """

    KIND: ClassVar[str] = "batch"
    __pydantic_config__ = STRICT
    iteration: int
    number: int
    responses: tuple[GradedResponse, ...]
    reward_errors: tuple[str, ...] = ()
    filtered: tuple[GradedResponse, ...] = ()
    given_up: Annotated[tuple[str, ...], Field(exclude_if=lambda held: not held)] = ()
    nonce: str = field(default_factory=nonce)

    @property
    def graded(self) -> tuple[GradedResponse, ...]:
        """The responses of trained and of filtered groups; those that failed have no reward."""
        return (*self.responses, *self.filtered)


def is_filtered(plan: PlanRecord, group: Iterable[GradedResponse]) -> bool:
    """True if dynamic sampling drops this group because its graded responses have equal values."""
    return len({response.deciding(plan) for response in group if response.reward is not None}) < 2


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """training.json: the measurements of the train task, and the `weight_version` published by the task."""

    KIND: ClassVar[str] = "training"
    __pydantic_config__ = STRICT
    iteration: int
    weight_version: int
    metrics: dict[str, float]
    reward_errors: tuple[str, ...]
    started_at_s: float
    ended_at_s: float
    nonce: str = field(default_factory=nonce)


@dataclass(frozen=True, kw_only=True)
class SlotLife:
    """One process life on the iteration's time line. Fields not named here: as in the HeartbeatRecord.

    Attributes:
        state: "gone" after an exit with nothing unfinished, "left" after handing work over, "lost" after falling
            silent.
        tokens_kept: sampled tokens in the batches.
        tokens_regenerated: sampled tokens that do not count, and had to be sampled again by another process.
        tokens_unused: sampled tokens of responses in no batch, because enough groups were trained.
        usd_per_hour: price of the machine, if it differs from the price of its pool.
    """

    __pydantic_config__ = STRICT
    slot: int
    incarnation: str
    pool: str
    started_at_s: float
    ended_at_s: float
    state: Literal["gone", "left", "lost"]
    tokens_kept: int
    tokens_recovered: int
    tokens_regenerated: int
    prefill_tokens: int = 0
    usd_per_hour: float | None = None
    tokens_unused: int = 0
    working_at_s: float | None = None
    decode_s: float = 0.0
    puts: int = 0
    gets: int = 0
    bytes_read: int = 0
    drafts: Annotated[DraftTotals | None, Field(exclude_if=lambda held: held is None)] = None


@dataclass(frozen=True, kw_only=True)
class ReportRecord:
    """report.json: the iteration is committed.

    Attributes:
        metrics: by the names of docs/guide/metrics.md.
        rewards, lengths: reward and policy length of each response with a reward, in the order of the batches.
        next_prompt: number of the first prompt of the next iteration.
        lives: process lives of the crew, by slot and start.
        pools: observations of the pools' machines, from which the next plan is made.
    """

    KIND: ClassVar[str] = "report"
    __pydantic_config__ = STRICT
    iteration: int
    weight_version: int
    next_prompt: int
    metrics: dict[str, float]
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    lives: tuple[SlotLife, ...]
    train_started_at_s: float
    train_ended_at_s: float
    created_at_s: float
    pools: tuple[PoolObservation, ...] = ()
    nonce: str = field(default_factory=nonce)


def encode(key: str, record: AnyRecord) -> bytes:
    """The bytes of a record for `key`, and for no other: its canonical JSON in an envelope."""
    return wrap(key, record.KIND, canonical.encode(record))


def decode(record_type: type[Record], key: str, data: bytes) -> Record:
    """The record in the bytes read from `key`; raises CorruptObject, which names `key` and the first thing wrong."""
    return canonical.decode(record_type, key, unwrap(key, record_type.KIND, data))


def read(store: ObjectStore, record_type: type[Record], key: str) -> Record:
    """Get and decode; raises ObjectMissing or CorruptObject."""
    return decode(record_type, key, store.get(key))


def put(store: ObjectStore, key: str, record: AnyRecord) -> None:
    """Write or overwrite a record."""
    store.put(key, encode(key, record))


def commit(store: ObjectStore, key: str, record: AnyRecord) -> bool:
    """Create a record exactly once, as `storage.stores.store.commit`: False if another writer's object is there."""
    return commit_bytes(store, key, encode(key, record))
