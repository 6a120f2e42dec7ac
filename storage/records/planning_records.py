"""Planning in plans and reports: expectations, decisions and observations (docs/format.md section 3)."""

from dataclasses import dataclass, field

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=True)


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """A decision of the planner, with the figures behind the decision.

    Attributes:
        name: the subject of the decision.
        chosen: the choice in words.
        inputs: figures that the decision was made from.
        alternatives: name of each candidate, the chosen included, to its predicted figures.
        predicted: expected values of the report's metrics, by name.
    """

    __pydantic_config__ = STRICT
    name: str
    chosen: str
    reason: str
    inputs: dict[str, float] = field(default_factory=dict)
    alternatives: dict[str, dict[str, float]] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SeedingRecord:
    """How long the trainer's machine generates before training, and the memory of the controller.

    Attributes:
        seeding_s: seconds; None: until no response is left, for example without any other member.
        members: size of the crew at the time of the decision.
        memory: for each number of members, the seeding time that suited it.
    """

    __pydantic_config__ = STRICT
    seeding_s: float | None
    members: int
    memory: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LengthsRecord:
    """Expected lengths of the groups, in tokens, in the order of the groups.

    Attributes:
        predictor: name of the predictor.
        expected: mean length of a group's responses.
        high: 90 % quantile of the lengths of a group's responses.
    """

    __pydantic_config__ = STRICT
    predictor: str
    expected: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PoolObservation:
    """The work of the machines of one pool in an iteration; input of the next plan.

    Attributes:
        members: mean number of machines at work.
        members_at_end: number of machines at work when the last response ended.
        machine_s: paid seconds, summed over machines.
        losses: number of machines that fell silent or were given notice.
        start_s: median seconds from process start to weights in place; None: no machine got so far.
        step_s: (batch size, seconds of a decode step), ascending.
    """

    __pydantic_config__ = STRICT
    pool: str
    members: float
    members_at_end: int
    machine_s: float
    losses: int
    start_s: float | None
    step_s: tuple[tuple[int, float], ...]
