"""Dollars of an iteration at list price, by who caused them and by what they were spent on. Each dollar counts once.

This module knows no store: it has functions of process lives, of the trainer's measurements, and of prices.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

from resources.prices import RequestPrices, dollars
from storage.records.hints import CollectedRecord
from storage.records.records import CONTROL_POOL, JOINED_POOL, TRAIN_POOL, ReportRecord, SlotLife, TrainingRecord

BYTES_PER_GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Rates:
    """List prices.

    Attributes:
        usd_per_h: By pool, per slot; TRAIN_POOL: for all machines of the trainer; CONTROL_POOL: 0 if missing.
        egress_usd_per_gb: By pool, for bytes read from the store; 0 if missing.
        requests: Prices of requests to the store.
    """

    usd_per_h: Mapping[str, float]
    egress_usd_per_gb: Mapping[str, float] = field(default_factory=dict)
    requests: RequestPrices = field(default_factory=RequestPrices)


@dataclass(frozen=True, slots=True)
class MachineTime:
    """Paid time of a machine by use, in seconds or in dollars.

    Attributes:
        useful: Decoding tokens that count, or training.
        wasted: Decoding other tokens.
        starting: Until the weights were in place.
        idle: Everything else.
    """

    useful: float = 0.0
    wasted: float = 0.0
    starting: float = 0.0
    idle: float = 0.0

    @property
    def total(self) -> float:
        return self.useful + self.wasted + self.starting + self.idle

    def __add__(self, other: "MachineTime") -> "MachineTime":
        return MachineTime(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def scaled(self, factor: float) -> "MachineTime":
        return MachineTime(*(value * factor for value in astuple(self)))


def life_time(life: SlotLife) -> MachineTime:
    """Seconds of a process life, from its start to its last heartbeat.

    Decoding time is divided by tokens. A life that never decoded and never got weights was starting all the time. A
    life that decoded, but had not got weights at its last heartbeat, counts as decoding all the time.
    """
    total_s = max(0.0, life.ended_at_s - life.started_at_s)
    others = max(0, life.tokens_regenerated) + life.tokens_unused
    decoded = life.tokens_kept + others
    if life.working_at_s is None:
        return MachineTime(starting=total_s) if not decoded else _divided(total_s, life.tokens_kept, others)
    starting_s = min(total_s, max(0.0, life.working_at_s - life.started_at_s))
    decode_s = min(total_s - starting_s, max(0.0, life.decode_s))
    rest = MachineTime(starting=starting_s, idle=total_s - starting_s - decode_s)
    spent = rest + _divided(decode_s, life.tokens_kept, others)
    assert math.isclose(spent.total, total_s, abs_tol=1e-6), f"{life.incarnation}: the parts of its time do not add up"
    return spent


def _divided(decode_s: float, kept: int, others: int) -> MachineTime:
    useful_s = decode_s * kept / (kept + others) if kept else 0.0
    return MachineTime(useful=useful_s, wasted=decode_s - useful_s)


def trainer_time(lives: Sequence[SlotLife], training: TrainingRecord) -> MachineTime:
    """Seconds of the trainer's machines, which are paid for together: generating, waiting, training, training again.

    Those of a trainer that stands are paid for between two iterations, too.

    Lives of TRAIN_POOL run side by side on them. If they began before training did, the machines are paid for from then
    on.
    """
    seeding = [life for life in lives if life.pool == TRAIN_POOL]
    spans = [(life.started_at_s, min(life.ended_at_s, training.ended_at_s)) for life in seeding]
    before = [(start, min(end, training.started_at_s)) for start, end in spans]
    stood_s = training.metrics.get("timing_s/stood", 0.0)
    total_s = max(0.0, training.ended_at_s - training.started_at_s) + _covered_s(before) + stood_s
    seeding_s = min(total_s, _covered_s(spans))
    generated = sum((life_time(life) for life in seeding), MachineTime())
    share = seeding_s / generated.total if generated.total else 0.0
    left_s = total_s - (seeding_s if share else 0.0)
    idle_s = min(left_s, training.metrics.get("timing_s/wait", 0.0) + stood_s)
    again_s = min(left_s - idle_s, training.metrics.get("timing_s/replay", 0.0))
    return generated.scaled(share) + MachineTime(useful=left_s - idle_s - again_s, wasted=again_s, idle=idle_s)


def _covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of the spans, in seconds."""
    covered_s, until_s = 0.0, float("-inf")
    for start_s, end_s in sorted(spans):
        covered_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s


def crew_cost(lives: Sequence[SlotLife], prices_usd_per_h: Mapping[str, float]) -> tuple[float, float]:
    """(machine seconds, dollars at list price) of a crew.

    A life lasts from its process's start to its last heartbeat. A member that joined from outside costs the price it
    told, or nothing. Members on the trainer's machine cost nothing here, because it is paid for as the trainer's.
    """
    crew = [life for life in lives if life.pool != TRAIN_POOL]
    seconds = [life.ended_at_s - life.started_at_s for life in crew]
    usd = [dollars(s, _usd_per_h(life, prices_usd_per_h)) for life, s in zip(crew, seconds, strict=True)]
    return sum(seconds), sum(usd)


def _usd_per_h(life: SlotLife, prices_usd_per_h: Mapping[str, float]) -> float:
    if life.usd_per_hour is not None:
        return life.usd_per_hour
    return 0.0 if life.pool == JOINED_POOL else prices_usd_per_h[life.pool]


def cost_metrics(
    lives: Sequence[SlotLife],
    training: TrainingRecord,
    rates: Rates,
    tokens: int,
    planned_at_s: float,
    control_s: float,
    collected: CollectedRecord | None = None,
) -> dict[str, float]:
    """Machine seconds and dollars of the crew, the trainer and the rest, and the same dollars by purpose.

    control_s: known seconds of CONTROL_POOL, without those of `collected`, which are there if groups were recorded
    apart from training.
    """
    rollout_s, rollout_usd = crew_cost(lives, rates.usd_per_h)
    by_trainer = trainer_time(lives, training)
    usd = by_trainer.scaled(dollars(1.0, rates.usd_per_h[TRAIN_POOL]))
    train_usd = usd.total
    for life in lives:
        if life.pool != TRAIN_POOL:
            usd += life_time(life).scaled(dollars(1.0, _usd_per_h(life, rates.usd_per_h)))
    puts, gets = (sum(getattr(life, name) for life in lives) for name in ("puts", "gets"))
    asked = [training.metrics.get(f"requests/train_{name}", 0.0) for name in ("puts", "gets")]
    if collected is not None:
        control_s += collected.seconds
        asked = [asked[0] + collected.puts, asked[1] + collected.gets]
    requests_usd = rates.requests.usd(puts + int(asked[0]), gets + int(asked[1]))
    read_gb = {life.pool: 0.0 for life in lives}
    for life in lives:
        read_gb[life.pool] += life.bytes_read / BYTES_PER_GB
    egress_usd = sum(rates.egress_usd_per_gb.get(pool, 0.0) * gb for pool, gb in read_gb.items())
    control_usd = dollars(control_s, rates.usd_per_h.get(CONTROL_POOL, 0.0))
    iteration_usd = usd.total + requests_usd + egress_usd + control_usd
    # A plan task that writes stored responses generates nothing.
    crew = [life for life in lives if life.pool != CONTROL_POOL] or lives
    started = min(life.started_at_s for life in crew)
    collecting = {} if collected is None else {"timing_s/collect": collected.seconds}
    return {
        **collecting,
        # Clocks that agree to a few seconds may let a short rollout end before it was planned.
        "timing_s/rollout": max(0.0, max(life.ended_at_s for life in crew) - max(started, planned_at_s)),
        "timing_s/rollout_machines": rollout_s,
        "timing_s/train": training.ended_at_s - training.started_at_s,
        "requests/crew_puts": float(puts),
        "requests/crew_gets": float(gets),
        "requests/crew_bytes_read": float(sum(life.bytes_read for life in lives)),
        "cost/usd_rollout": rollout_usd,
        "cost/usd_train": train_usd,
        "cost/usd_useful": usd.useful,
        "cost/usd_wasted": usd.wasted,
        "cost/usd_starting": usd.starting,
        "cost/usd_idle": usd.idle,
        "cost/usd_requests": requests_usd,
        "cost/usd_egress": egress_usd,
        "cost/usd_control": control_usd,
        "cost/usd_iter": iteration_usd,
        "cost/usd_per_mtok": iteration_usd / tokens * 1e6 if tokens else 0.0,
    }


def usd_per_reward_point(reports: Sequence[ReportRecord]) -> float | None:
    """Dollars of the run per point of mean reward by which the last report exceeds the first.

    None if it does not exceed it, or if either is unknown. reports: all of a run, in order; a report that does not tell
    its own cost counts as free.
    """
    if not reports or any("reward" not in report.metrics for report in (reports[0], reports[-1])):
        return None
    gained = reports[-1].metrics["reward"] - reports[0].metrics["reward"]
    spent_usd = sum(report.metrics.get("cost/usd_iter", 0.0) for report in reports)
    return spent_usd / gained if gained > 0 else None
