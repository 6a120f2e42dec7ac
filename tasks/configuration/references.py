"""The values that tasks hand to each other: addresses and small numbers, never tokens.

They are plain dataclasses of plain fields, because Flyte carries them between machines as JSON.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlanReference:
    """An iteration whose plan is written. `execution` names the execution that advances the run."""

    run_url: str
    iteration: int
    weight_version: int
    execution: str


@dataclass(frozen=True, kw_only=True)
class SlotOutcome:
    """The work of the last incarnation of a slot; the truth is in the journal."""

    slot: int
    incarnation: str
    tokens_generated: int
    tokens_recovered: int
    responses_finished: int


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """The iteration that was trained, the weight version that the trainer published, and the mean reward."""

    plan: PlanReference
    weight_version: int
    reward: float


@dataclass(frozen=True, kw_only=True)
class EvaluationOutcome:
    """An evaluation of the run at `run_url` that has ended; `evaluation` is "" if none was due."""

    run_url: str
    evaluation: str
    weight_version: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class IterationOutcome:
    """A committed iteration; everything else is in its report."""

    run_url: str
    iteration: int
    weight_version: int
    reward: float
    tokens: int
    tokens_recovered: int
    usd: float
