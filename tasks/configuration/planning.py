"""The section `planning`: how groups are dealt, how many machines, at what cost."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _predictor(value: object) -> object:
    if value == "features":
        raise ValueError("allowed: 'auto', 'history', 'ranker' or 'none'; the ranker learns from the same features")
    return value


@dataclass(frozen=True, kw_only=True)
class PlanningConfig:
    """How each iteration is planned; nothing here changes what is learned.

    Attributes:
        dispatch: "auto" deals groups by expected length, as soon as one is known; "in_turn" deals them in turn.
        objective: what dealing minimises: "makespan", the time until the last response has ended, or "gpu_seconds", the
            machines' time until each may leave.
        length_predictor: "auto" takes the predictor that measured best; "none" expects all groups alike.
        width: "fixed" takes `count` members of every pool. "cost" takes the number from `count_min` to `count` that
            weighs time against dollars best. "balance" takes one member more than before if generating takes longer
            than training by more than that member saves, and one fewer in the opposite case.
        cost_weight: weight of dollars against time in width "cost"; 0: only time counts, 1: only dollars.
        usd_per_iteration_max: an iteration that is expected to cost more is planned smaller, or refused.
        usd_per_run_max: no iteration is planned that is expected to take the run's cost beyond this.
        seeding: "auto" lets the trainer's machines generate, too, until training can be kept busy, and again while no
            member has lived for `RolloutConfig.seeding_after_s`.
        cut_share: with objective "gpu_seconds", a member that has ended this share of its responses hands the others to
            members with room, and leaves; null: never.
    """

    __pydantic_config__ = STRICT
    dispatch: Literal["auto", "in_turn"] = "auto"
    objective: Literal["makespan", "gpu_seconds"] = "makespan"
    length_predictor: Annotated[Literal["auto", "history", "ranker", "none"], BeforeValidator(_predictor)] = "auto"
    width: Literal["fixed", "cost", "balance"] = "fixed"
    cost_weight: Annotated[float, Field(ge=0, le=1)] = 0.3
    usd_per_iteration_max: Annotated[float, Field(gt=0)] | None = None
    usd_per_run_max: Annotated[float, Field(gt=0)] | None = None
    seeding: Literal["off", "auto"] = "off"
    cut_share: Annotated[float, Field(gt=0, lt=1)] | None = None

    def __post_init__(self) -> None:
        if self.cut_share is not None and self.objective != "gpu_seconds":
            raise ValueError(f"cut_share: {self.cut_share} given; allowed with objective {self.objective!r}: null")
