"""The section `teacher`: a model, or several, from whose distributions the policy learns on its own responses."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from resources.pools import PoolConfig
from tasks.configuration.rollout import VllmConfig

STRICT = ConfigDict(extra="forbid", strict=True)
Divergence = Literal["reverse", "forward", "jsd"]
# The name of the only teacher of a run.
ONLY = "teacher"
# The name becomes part of storage keys.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """On-policy distillation: the teacher scores the policy's responses, alone or beside rewards.

    Attributes:
        path: A Hugging Face model directory where `plan` runs, or the id of a model on the hub. The tokenizer must be
            the policy's.
        revision: Of an id in `path`: branch, tag or commit; None: main.
        paths: Several teachers by name, each a directory or an id; in place of `path`.
        column: With `paths`, the column of the data that names the teacher of a prompt.
        weight: Without `top_k` the factor of log(policy / teacher) of a sampled token, which is subtracted from the
            token's advantage. With `top_k` the factor of the divergence in the loss.
        kl: KL(policy || teacher) is "reverse", KL(teacher || policy) "forward", and "jsd" is the mean of both
            distributions' KL to their mean.
        top_k: The divergence over the teacher's most likely tokens, so many, with the rest of the vocabulary as one
            more token. None: the sampled token alone, which gives the reverse KL.
        pool: The pool of `pools.scoring` whose machines score; None: the trainer's processes score.
        engine: With `pool`, what computes the scores: "torch" as the trainer does, or "vllm" by its prompt_logprobs.
        vllm: With `engine` "vllm", its settings, as of members. Several teachers share `gpu_memory_utilization` evenly.
    """

    __pydantic_config__ = STRICT
    path: Annotated[str, Field(min_length=1)] | None = None
    revision: Annotated[str, Field(min_length=1)] | None = None
    paths: dict[str, Annotated[str, Field(min_length=1)]] = field(default_factory=dict)
    column: Annotated[str, Field(min_length=1)] | None = None
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    kl: Divergence = "reverse"
    top_k: Annotated[int, Field(ge=1, le=256)] | None = None
    pool: str | None = None
    engine: Literal["torch", "vllm"] = "torch"
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.paths):
            raise ValueError(f"path: {'missing' if self.path is None else 'given'}; allowed: either path or paths")
        if bool(self.paths) != (self.column is not None):
            raise ValueError(
                f"column: {'missing' if self.paths else 'given'}; allowed with {'paths' if self.paths else 'path'}: "
                f"{'a column of the data' if self.paths else 'nothing'}"
            )
        if self.paths and self.revision is not None:
            raise ValueError(f"revision: value {self.revision!r}; allowed with paths: null")
        for name in self.paths:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"paths: name {name!r}; allowed: up to 64 letters, digits, _, . and -, the first no . or -"
                )
        if self.kl != "reverse" and self.top_k is None:
            raise ValueError(
                f"kl: value {self.kl!r}; allowed without top_k: 'reverse', because a sampled token tells no other"
            )

    @property
    def models(self) -> dict[str, str]:
        """The directory, or the id, of each teacher by name."""
        return {ONLY: self.path} if self.path is not None else dict(self.paths)

    @property
    def in_trainer(self) -> dict[str, str]:
        """The teachers that the trainer's processes load, as in `models`: none with `pool`."""
        return {} if self.pool else self.models

    @property
    def vllm_of_each(self) -> VllmConfig:
        """The settings of vLLM for each teacher of a scorer."""
        return replace(self.vllm, gpu_memory_utilization=self.vllm.gpu_memory_utilization / len(self.models))

    def head_size(self, vocabulary: int) -> int:
        """How many tokens a head has, 0 without `top_k`; vocabulary: the policy's number of tokens."""
        return min(self.top_k or 0, vocabulary)

    def field_of(self, name: str) -> str:
        """The field with the path of a teacher."""
        return "teacher.path" if self.path is not None else f"teacher.paths.{name}"

    def teacher_of(self, columns: Mapping[str, Any]) -> str:
        """The teacher of a prompt, by the columns of the data; raises ValueError, in one line, without one."""
        if self.column is None:
            return ONLY
        value = columns.get(self.column)
        if not isinstance(value, str) or value not in self.paths:
            given = f"value {str(value)[:80]!r}" if self.column in columns else "missing"
            raise ValueError(
                f"data: column {self.column!r}: {given}; allowed (teacher.paths): {', '.join(map(repr, self.paths))}"
            )
        return value


def longest_scored(config: Any, *positions_max: int | None) -> int | None:
    """The most tokens of prompt and response that are scored together; None if nothing limits them.

    config: the RunConfig. positions_max: of models, where known.
    """
    limits = [config.rollout.context_length, *positions_max]
    if config.data.max_prompt_length is not None:
        limits.append(config.data.max_prompt_length + config.sampling.max_completion_length)
    return min((each for each in limits if each is not None), default=None)


def teachers_that_clash(config: Any) -> Iterator[str]:
    """A line about each setting that a teacher excludes, with what is allowed. config: the RunConfig."""
    yield from _pools_that_clash(config)
    if config.teacher is None:
        return
    if config.algorithm.learns_examples:
        kind = config.algorithm.kind
        yield f"teacher: given; allowed with algorithm.kind {kind!r}: nothing, because it scores the policy's tokens"
        return
    if config.algorithm.filter_groups:
        yield (
            "algorithm.filter_groups: value true; allowed with teacher: false, because a group of equal rewards has a "
            "teacher's signal"
        )
    if not config.rewards and config.evaluation is not None and config.evaluation.rewards is None:
        yield "evaluation.rewards: value null; allowed without rewards: at least one"


def _pools_that_clash(config: Any) -> Iterator[str]:
    """A line about a pool that cannot score, and about each pool of scorers that nothing names."""
    scoring = config.pools.scoring
    named = None if config.teacher is None else config.teacher.pool
    if named is not None and named not in scoring:
        known = ", ".join(map(repr, scoring)) or "none is there"
        why = f"; pool {named!r} has other work" if named in (*config.pools.rollout_pools, "train", "control") else ""
        yield f"teacher.pool: value {named!r}; allowed: null, or a pool of pools.scoring ({known}){why}"
    for name in scoring:
        if name != named:
            yield f"pools.scoring.{name}: given; allowed: the pool that teacher.pool names ({json.dumps(named)})"
    if config.teacher is not None and config.teacher.engine == "vllm":
        yield from _scorers_that_clash(config.teacher, scoring)


def _scorers_that_clash(teacher: TeacherConfig, scoring: Mapping[str, PoolConfig]) -> Iterator[str]:
    """A line about each setting that scorers by vLLM exclude."""
    if teacher.pool is None:
        yield (
            "teacher.engine: value 'vllm'; allowed without teacher.pool: 'torch', because the trainer's processes score"
        )
    if teacher.vllm.max_lora_rank is not None:
        yield (
            f"teacher.vllm.max_lora_rank: value {teacher.vllm.max_lora_rank}; allowed: null, because a teacher has no "
            "adapters"
        )
    pool, per_engine = scoring.get(teacher.pool or ""), teacher.vllm.tensor_parallel_size
    if pool is not None and pool.gpus % per_engine:
        yield (
            f"pools.scoring.{teacher.pool}.gpus: value {pool.gpus}; allowed: 0, or a multiple of "
            f"teacher.vllm.tensor_parallel_size ({per_engine}), which a scorer uses"
        )
