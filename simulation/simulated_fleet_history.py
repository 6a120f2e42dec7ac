"""A history of a fleet drawn in advance from a seed: runs, hosts, and faults, with bounds and an end."""

import random
from dataclasses import dataclass
from typing import Literal

from simulation.simulated_weather import draw_weather, in_calm
from storage.stores.faults import FaultRates

FleetStrikeKind = Literal[
    "kill", "freeze", "suspend", "clock", "heartbeat", "outage", "denied", "worker", "run away", "told"
]
KINDS: tuple[FleetStrikeKind, ...] = (
    *("kill", "kill", "freeze", "freeze", "suspend", "worker", "worker"),
    *("clock", "heartbeat", "outage", "denied", "run away", "told"),
)


@dataclass(frozen=True, kw_only=True)
class FleetStrike:
    """A fault; what it strikes is drawn when it happens."""

    at_s: float
    kind: FleetStrikeKind
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class DrawnRun:
    """A run of a fleet.

    Attributes:
        phase_s, rollout_s: mean seconds of a phase and of a rollout.
        iterations: number of iterations.
        admitted_at_s, exists_at_s: when the records of admission and of the run are written, in any order.
        leaves_at_s: when the run leaves; None: never.
    """

    phase_s: float
    rollout_s: float
    iterations: int
    share: float
    state_bytes: int
    admitted_at_s: float
    exists_at_s: float
    leaves_at_s: float | None


@dataclass(frozen=True, kw_only=True)
class DrawnHost:
    """A machine of the fleet.

    Attributes:
        stays_s: seconds that each incarnation serves; None: until the end.
        back_s: seconds until the next incarnation.
        backfill_s: a member generates on the host while no phase is expected for this time; None: no member does.
    """

    arrives_at_s: float
    memory_bytes: int
    stays_s: float | None
    back_s: float
    backfill_s: float | None


@dataclass(frozen=True, kw_only=True)
class FleetHistory:
    """The course of a fleet's history as drawn in advance.

    Attributes:
        hangs: the probability, until the calm, that a phase takes far too long.
    """

    seed: int
    runs: tuple[DrawnRun, ...]
    hosts: tuple[DrawnHost, ...]
    strikes: tuple[FleetStrike, ...]
    weather: FaultRates
    crashes: int
    calm_at_s: float
    host_ttl_s: float
    poll_interval_s: float
    look_interval_s: float
    overtime_s_min: float
    hangs: float

    @property
    def calm(self) -> FaultRates:
        """The store's fault rates when there are no more faults."""
        return in_calm(self.weather)

    @property
    def limit_s(self) -> float:
        """By when every run must have ended, with much to spare."""
        work_s = sum(run.iterations * (run.rollout_s + 4 * run.phase_s) for run in self.runs)
        return 2000.0 + self.calm_at_s + 10 * self.host_ttl_s + 3 * work_s


def draw_fleet_history(seed: int) -> FleetHistory:
    """The history of a seed; the same on every machine and in every process."""
    rng = random.Random(f"fleet {seed}")
    ttl_s = rng.uniform(15, 40)
    calm_at_s = rng.uniform(150, 400)
    quiet = rng.random() < 0.15
    runs = tuple(_draw_run(rng) for _ in range(rng.choice((1, 2, 2, 3, 3, 4))))
    hosts = tuple(_draw_host(rng, number) for number in range(rng.choice((1, 1, 2, 2, 3))))
    strikes = tuple(
        FleetStrike(at_s=rng.uniform(5, calm_at_s), kind=rng.choice(KINDS), duration_s=rng.uniform(0.2, 5) * ttl_s)
        for _ in range(rng.choice((0, 1, 2, 4, 6)))
    )
    weather = draw_weather(rng, ttl_s)
    return FleetHistory(
        seed=seed,
        runs=runs,
        hosts=hosts,
        strikes=() if quiet else strikes,
        weather=in_calm(weather) if quiet else weather,
        crashes=0 if quiet else rng.choice((0, 0, 1, 2, 3)),
        calm_at_s=calm_at_s,
        host_ttl_s=ttl_s,
        poll_interval_s=rng.uniform(2, 5),
        look_interval_s=rng.choice((rng.uniform(1, 4), rng.uniform(5, 15))),
        overtime_s_min=rng.uniform(60, 120),
        hangs=0.0 if quiet else rng.choice((0.0, 0.0, 0.05)),
    )


def _draw_run(rng: random.Random) -> DrawnRun:
    return DrawnRun(
        phase_s=rng.uniform(5, 40),
        rollout_s=rng.uniform(10, 80),
        iterations=rng.randint(2, 4),
        share=rng.choice((1.0, 1.0, 2.0, 0.5)),
        state_bytes=rng.randint(1, 5),
        admitted_at_s=rng.uniform(0, 60),
        exists_at_s=rng.uniform(0, 120),
        leaves_at_s=rng.uniform(60, 300) if rng.random() < 0.08 else None,
    )


def _draw_host(rng: random.Random, number: int) -> DrawnHost:
    return DrawnHost(
        arrives_at_s=rng.uniform(0, 20) if number == 0 or rng.random() < 0.6 else rng.uniform(0, 250),
        memory_bytes=rng.randint(5, 9),
        stays_s=rng.uniform(120, 400) if rng.random() < 0.2 else None,
        back_s=rng.uniform(5, 60),
        backfill_s=rng.choice((None, rng.uniform(2, 20), rng.uniform(2, 20))),
    )
