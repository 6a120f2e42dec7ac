"""What the planner keeps in a plan and finds in a report: expectations, decisions, observations (docs/format.md 3)."""

from dataclasses import dataclass, field

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=True)


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """A decision of the planner, with what it knew.

    name: which one; chosen: in words. inputs: figures it was made from. alternatives: name to predicted figures, the
    chosen one included. predicted: what the report's metrics of these names will be if it was right.
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
    """How long the trainer's machine generates before it trains, and what the controller remembers.

    seeding_s: None: until nothing is left, as where there is no other member. members: of the crew, when it was
    decided. memory: number of members to the seeding time that suited them.
    """

    __pydantic_config__ = STRICT
    seeding_s: float | None
    members: int
    memory: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LengthsRecord:
    """What the planner expected of the groups' lengths, in the order of the groups.

    predictor: who said so; expected: mean length of a group's responses; high: what one in ten of them exceeds.
    """

    __pydantic_config__ = STRICT
    predictor: str
    expected: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PoolObservation:
    """How the machines of one pool did in an iteration; what the next plan is made from.

    members: mean number of machines at work; members_at_end: when the last response had ended. machine_s: paid for, in
    all. losses: machines that fell silent or were given notice. start_s: median from process start to weights in
    place; None when nobody got so far. step_s: (batch size, seconds of a decode step), ascending.
    """

    __pydantic_config__ = STRICT
    pool: str
    members: float
    members_at_end: int
    machine_s: float
    losses: int
    start_s: float | None
    step_s: tuple[tuple[int, float], ...]
