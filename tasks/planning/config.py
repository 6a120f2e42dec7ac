"""What a user may set about planning: who generates what, how many machines, for how much. Imports no planner."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class PlanningConfig:
    """How each iteration is planned; nothing here changes what is learned.

    Attributes:
        dispatch: "auto" deals groups by expected length, once something is known of it; "in_turn" deals them in turn.
        objective: what dealing makes small: "makespan", the time until the last response has ended, or "gpu_seconds",
            the machines' time until each may leave.
        length_predictor: "auto" takes the best that was measured; "none" expects all groups alike.
        recall_min: a predictor that found less than this share of the longest groups in the last iterations is not
            used; 0.2 is what chance finds of the longest fifth.
        width: "fixed" takes `count` members of every pool; "cost" takes as many, from `count_min` to `count`, as weigh
            time against dollars best; "balance" takes one more, or one less, than before, when generating takes longer
            than training by more than that member saves, or so much less.
        cost_weight: of dollars against time in width "cost"; 0: only time counts, 1: only dollars.
        usd_per_iteration_max: an iteration that is expected to cost more is planned smaller, or refused.
        usd_per_run_max: no iteration is planned that is expected to take the run beyond this.
        seeding: "auto" has the trainer's machines generate, too, until training can be kept busy.
        seeding_s_initial: how long, the first time.
        seeding_s_min: at least so long, unless there are members enough without.
        seeding_adaptation: the time changes by the difference of the two waits divided by this.
        seeding_after_s: with seeding "auto", the trainer's machines generate again when no member has lived for this
            long, until one does or nothing is left; somewhat longer than an engine takes to start.
        cut_share: with objective "gpu_seconds", a member of whose responses so many have ended hands the others to
            members with room, and leaves; null: never.
    """

    __pydantic_config__ = STRICT
    dispatch: Literal["auto", "in_turn"] = "auto"
    objective: Literal["makespan", "gpu_seconds"] = "makespan"
    length_predictor: Literal["auto", "history", "features", "ranker", "none"] = "auto"
    recall_min: Annotated[float, Field(ge=0, le=1)] = 0.3
    width: Literal["fixed", "cost", "balance"] = "fixed"
    cost_weight: Annotated[float, Field(ge=0, le=1)] = 0.3
    usd_per_iteration_max: Annotated[float, Field(gt=0)] | None = None
    usd_per_run_max: Annotated[float, Field(gt=0)] | None = None
    seeding: Literal["off", "auto"] = "off"
    seeding_s_initial: Annotated[float, Field(ge=0)] = 150.0
    seeding_s_min: Annotated[float, Field(ge=0)] = 5.0
    seeding_adaptation: Annotated[float, Field(ge=1)] = 3.0
    seeding_after_s: Annotated[float, Field(gt=0)] = 120.0
    cut_share: Annotated[float, Field(gt=0, lt=1)] | None = None

    def __post_init__(self) -> None:
        if self.cut_share is not None and self.objective != "gpu_seconds":
            raise ValueError(f"cut_share: {self.cut_share} given; allowed with objective {self.objective!r}: null")
