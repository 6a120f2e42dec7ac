"""What the planner writes into a plan and reads in a report: expectations, decisions, observations (format.md 3)."""

from dataclasses import dataclass, field

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=True)


@dataclass(frozen=True, kw_only=True)
class DecisionRecord:
    """A decision of the planner, with what it knew.

    name: which decision; chosen: the choice in words. inputs: the figures it was made from. alternatives: name to
    predicted figures, including the chosen one. predicted: the values of the report's metrics of these names that it
    expects.
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

    seeding_s: None: until nothing is left, for example if there is no other member. members: of the crew, at the time
    of the decision. memory: for each number of members, the seeding time that suited it.
    """

    __pydantic_config__ = STRICT
    seeding_s: float | None
    members: int
    memory: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LengthsRecord:
    """The lengths that the planner expects of the groups, in the order of the groups.

    predictor: its name; expected: mean length of a group's responses; high: the length that one in ten of them exceeds.
    """

    __pydantic_config__ = STRICT
    predictor: str
    expected: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PoolObservation:
    """How the machines of one pool did in an iteration; the next plan is made from it.

    members: mean number of machines at work; members_at_end: their number when the last response ended. machine_s:
    seconds paid for, of all machines. losses: machines that fell silent or were given notice. start_s: median from
    process start to weights in place; None if no machine got so far. step_s: (batch size, seconds of a decode step),
    ascending.
    """

    __pydantic_config__ = STRICT
    pool: str
    members: float
    members_at_end: int
    machine_s: float
    losses: int
    start_s: float | None
    step_s: tuple[tuple[int, float], ...]
