"""The planner's request: what a run offers and remembers when its next iteration is planned.

Only the last few reports are read, however long the run is.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from storage.records import layout
from storage.records.hints import read_hint
from storage.records.planning_records import PoolObservation
from storage.records.records import TRAIN_POOL, PlanRecord, ReportRecord
from storage.records.run import read_plan
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.crew_model.ownership import CrewRules
from tasks.crew_model.step_time import NOMINAL, StepTime
from tasks.history.run_cost import spent_usd
from tasks.planning.capacity import GroupLengths, PoolCapacity, StepWaits, TrainerCapacity
from tasks.planning.explain import CREW, ITERATION
from tasks.planning.request import PlanningRequest

REPORTS_READ = 8
# The weight of an observation, relative to the next newer observation.
FADING = 0.5
SECONDS_PER_HOUR = 3600.0
# The metrics of a report with dollars for anything but the machine time of crew and trainer.
NO_MACHINE = ("cost/usd_score", "cost/usd_requests", "cost/usd_egress", "cost/usd_control")


def planning_request(store: ObjectStore, config: RunConfig, iteration: int, lengths: GroupLengths) -> PlanningRequest:
    """The knowledge at the planning of `iteration`: pools with prices, and recent observations of the machines.

    If iterations overlap, the last concluded iteration counts, and the expected dollars of the iterations in between
    count as spent. Raises LookupError or PricesError if a pool has no price.
    """
    recent = recent_reports(store, iteration)
    last = recent[0] if recent else None
    plans = [read_plan(store, report.iteration) for report in recent]
    written = plans[0] if plans else None
    overlaps = config.algorithm.max_staleness > 0
    engines = config.trainer.nnodes * config.trainer.nproc_per_node
    return PlanningRequest(
        num_generations=config.run.num_generations,
        lengths=lengths,
        pools=pool_capacities(config, recent, written),
        settings=config.planning,
        rules=crew_rules(config),
        keep_order=config.algorithm.filter_groups,
        # Also without seeding: an iteration's cost depends on how long the trainer's machines wait.
        reserved=_reserved_offer(config, recent),
        waits=None if last is None else step_waits(last, engines, overlaps=overlaps),
        seeding=None if written is None else written.seeding,
        width=() if written is None else _width(written),
        planned_width=_width(read_plan(store, iteration - 1)) if iteration else None,
        train_s=_train_s(recent),
        training=_training(config),
        past_lengths=_past_lengths(recent, plans, len(lengths), config.run.num_generations),
        control_s=0.0 if last is None else max(0.0, last.created_at_s - last.train_ended_at_s),
        overlaps=overlaps,
        spent_usd=_spent_usd(store, iteration, last),
        usd_no_machine=0.0 if last is None else sum(last.metrics.get(name, 0.0) for name in NO_MACHINE),
        length_max=float(config.sampling.max_completion_length),
        tool_s_per_token=_tool_s_per_token(recent),
        crew=config.rollout.crew,
    )


def crew_rules(config: RunConfig) -> CrewRules:
    """The settings that the run's members follow."""
    return CrewRules(
        flush_interval_s=config.rollout.flush_interval_s,
        heartbeat_interval_s=config.rollout.heartbeat_interval_s,
        claim_ttl_s=config.rollout.claim_ttl_s,
        objective=config.planning.objective,
        cut_share=config.planning.cut_share,
    )


def recent_reports(store: ObjectStore, iteration: int) -> list[ReportRecord]:
    """The last REPORTS_READ readable reports before an iteration, the newest first; missing reports are skipped."""
    found: list[ReportRecord] = []
    for before in range(iteration - 1, -1, -1):
        report = read_hint(store, ReportRecord, layout.report(before))
        if report is not None:
            found.append(report)
        if len(found) == REPORTS_READ:
            break
    return found


def _tool_s_per_token(recent: Sequence[ReportRecord]) -> float:
    """Seconds of waiting for tools per token of the last iterations with turns; 0 without turns."""
    told = [report for report in recent if "turns/tool_seconds" in report.metrics]
    tokens = sum(sum(report.lengths) for report in told)
    return sum(report.metrics["turns/tool_seconds"] for report in told) / tokens if tokens else 0.0


def pool_capacities(
    config: RunConfig, recent: Sequence[ReportRecord], written: PlanRecord | None = None
) -> tuple[PoolCapacity, ...]:
    """The capacity of each pool of the crew, in the configuration's order, with PoolCapacity's defaults if unobserved.

    written: the plan of the newest report.
    """
    capacities, asked = [], dict(() if written is None else _width(written))
    for name, pool in config.pools.rollout_pools.items():
        observed = _observations(name, recent)
        machine_h = sum(seen.machine_s for seen in observed) / SECONDS_PER_HOUR
        capacities.append(
            PoolCapacity(
                name=name,
                count_min=pool.count_min,
                count_max=pool.count,
                usd_per_h=pool.price_usd_per_h,
                responses_max=config.rollout.max_responses_in_flight,
                step_time=observed_step_time(observed),
                start_s=_start_s(observed),
                cold_start_s=_cold_start_s(name, observed, written),
                machine_start_s=_machine_start_s(name, recent),
                machines_present=_machines_at_end(name, recent),
                losses_per_h=sum(seen.losses for seen in observed) / machine_h if machine_h else 0.0,
                available=_available(name, recent, asked.get(name, 0)),
            )
        )
    return tuple(capacities)


def _reserved_offer(config: RunConfig, recent: Sequence[ReportRecord]) -> TrainerCapacity:
    trainer, observed = config.trainer, _observations(TRAIN_POOL, recent)
    return TrainerCapacity(
        engines=trainer.nnodes * trainer.nproc_per_node,
        usd_per_h=trainer.nnodes * config.pools.train.price_usd_per_h,
        responses_max=config.rollout.max_responses_in_flight,
        step_time=observed_step_time(observed),
        start_s=_start_s(observed),
    )


def _observations(pool: str, recent: Sequence[ReportRecord]) -> list[PoolObservation]:
    return [seen for report in recent for seen in report.pools if seen.pool == pool]


def _available(pool: str, recent: Sequence[ReportRecord], asked: int) -> int | None:
    """Machines at the end of the last iteration, if they were fewer than planned; else None."""
    at_end = [seen.members_at_end for seen in recent[0].pools if seen.pool == pool] if recent else []
    return at_end[0] if at_end and at_end[0] < asked else None


def _machines_at_end(pool: str, recent: Sequence[ReportRecord]) -> int | None:
    """Machines at the end of the last iteration; None if the report has no observation of the pool."""
    at_end = [seen.members_at_end for seen in recent[0].pools if seen.pool == pool] if recent else []
    return at_end[0] if at_end else None


def _machine_start_s(pool: str, recent: Sequence[ReportRecord]) -> float:
    """Seconds to start a machine: the longest minus the shortest time from the plan to the start of the processes.

    No report has the time at which a machine was asked for. An iteration that had to start machines begins later after
    its plan than an iteration with running machines.
    """
    waited_s = []
    for report in recent:
        first: dict[int, float] = {}
        for life in report.lives:
            if life.pool == pool:
                first[life.slot] = min(life.started_at_s, first.get(life.slot, life.started_at_s))
        if first and ITERATION in report.metrics:
            written_at_s = report.created_at_s - report.metrics[ITERATION]
            waited_s.append(statistics.median(first.values()) - written_at_s)
    return max(waited_s) - min(waited_s) if waited_s else 0.0


def _past_lengths(
    recent: Sequence[ReportRecord], plans: Sequence[PlanRecord], groups: int, num_generations: int
) -> tuple[npt.NDArray[np.float64], ...]:
    """The lengths of the last iterations with training and an equal `num_generations`, the newest first."""
    found = (
        _lengths(report, groups, num_generations)
        for report, plan in zip(recent, plans, strict=True)
        if plan.num_generations == num_generations and "timing_s/wait" in report.metrics
    )
    return tuple(lengths for lengths in found if lengths is not None)


def _lengths(report: ReportRecord, groups: int, num_generations: int) -> npt.NDArray[np.float64] | None:
    """The lengths of an iteration's responses, [groups, num_generations]; None for less than one group.

    An even selection of groups stands for a different number of groups. Where responses without a reward are missing,
    some groups are made of neighbours.
    """
    whole = len(report.lengths) // num_generations
    if not whole:
        return None
    each = np.array(report.lengths[: whole * num_generations], dtype=np.float64).reshape(whole, -1)
    found: npt.NDArray[np.float64] = np.maximum(1.0, each[np.linspace(0, whole - 1, groups).round().astype(int)])
    return found


def _start_s(observed: Sequence[PoolObservation]) -> float:
    starts_s = [seen.start_s for seen in observed if seen.start_s is not None]
    return statistics.median(starts_s) if starts_s else 0.0


def _cold_start_s(pool: str, observed: Sequence[PoolObservation], written: PlanRecord | None) -> float:
    """The longest start seen, also by the last plan: members of a standing crew start once in an execution."""
    known_s = [seen.start_s for seen in observed if seen.start_s is not None]
    decisions = () if written is None else written.decisions
    known_s += [each.inputs.get(f"{pool}/start_s", 0.0) for each in decisions if each.name == CREW]
    return max(known_s, default=0.0)


def observed_step_time(observed: Sequence[PoolObservation]) -> StepTime:
    """The measured step-time curve, with newer observations weighted more; NOMINAL if there are none.

    observed: the newest first, each with half the weight of the next newer observation. If a larger batch was measured
    as faster, both get their mean (isotonic regression by pooling adjacent violators, Ayer et al., 1955): a single slow
    outlier does not raise all larger batches.
    """
    measured: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for age, seen in enumerate(observed):
        for batch, step_s in seen.step_s:
            measured[batch].append((FADING**age, step_s))
    blocks: list[tuple[float, float, tuple[int, ...]]] = []
    for batch in sorted(measured):
        weight = sum(weight for weight, _ in measured[batch])
        mean_s = sum(weight * step_s for weight, step_s in measured[batch]) / weight
        batches: tuple[int, ...] = (batch,)
        while blocks and blocks[-1][0] >= mean_s:
            before_s, before, earlier = blocks.pop()
            mean_s = (before * before_s + weight * mean_s) / (before + weight)
            weight, batches = weight + before, earlier + batches
        blocks.append((mean_s, weight, batches))
    points = tuple((batch, mean_s) for mean_s, _, batches in blocks for batch in batches)
    return StepTime(points) if points else NOMINAL


def step_waits(report: ReportRecord, engines: int = 1, *, overlaps: bool = False) -> StepWaits | None:
    """The waits of a concluded iteration, from the report; None without the trainer's waiting time in the report.

    engines: the number of engines on the trainer's machines. overlaps: the crew went on with the next iteration.
    """
    crew = [life for life in report.lives if life.pool != TRAIN_POOL] or list(report.lives)
    wait_s = report.metrics.get("timing_s/wait")
    if wait_s is None or not crew:
        return None
    began_s = min(life.started_at_s if life.working_at_s is None else life.working_at_s for life in crew)
    ended_s = max(life.ended_at_s for life in crew)
    pools = [seen for seen in report.pools if seen.pool != TRAIN_POOL]
    seeded = [life.decode_s for life in report.lives if life.pool == TRAIN_POOL]
    behind_s = max(0.0, report.train_ended_at_s - ended_s)
    return StepWaits(
        wait_train_s=wait_s,
        wait_remote_s=0.0 if overlaps else behind_s,
        train_s=_computed_s(report.metrics),
        rollout_s=max(0.0, ended_s - began_s),
        members=sum(seen.members for seen in pools),
        members_at_end=sum(seen.members_at_end for seen in pools),
        generated_s=sum(seeded) / engines if seeded else None,
        behind_s=behind_s,
        publish_s=report.metrics.get("timing_s/publish", 0.0),
    )


def _training(config: RunConfig) -> Literal["as_ended", "in_order", "at_end"]:
    if not config.algorithm.streams:
        return "at_end"
    return "in_order" if config.in_plan_order else "as_ended"


def _train_s(recent: Sequence[ReportRecord]) -> float | None:
    metrics = [report.metrics for report in recent if "timing_s/wait" in report.metrics]
    return statistics.median(map(_computed_s, metrics)) if metrics else None


def _computed_s(metrics: Mapping[str, float]) -> float:
    """Seconds of training in which the trainer neither generated nor waited."""
    return max(0.0, metrics["timing_s/train"] - metrics["timing_s/wait"] - metrics.get("seeding/seconds", 0.0))


def _width(plan: PlanRecord) -> tuple[tuple[str, int], ...]:
    """The number of crew members in the plan, by pool."""
    return tuple(Counter(slot.pool for slot in plan.crew_slots).items())


def _spent_usd(store: ObjectStore, iteration: int, last: ReportRecord | None) -> float:
    """Dollars of concluded iterations, plus expected dollars of planned iterations (else the last iteration's cost)."""
    first_open = 0 if last is None else last.iteration + 1
    usd = spent_usd(store, first_open)
    usual_usd = 0.0 if last is None else last.metrics.get("cost/usd_iter", 0.0)
    for planned in range(first_open, iteration):
        decisions = read_plan(store, planned).decisions
        expected = [d.predicted["cost/usd_iter"] for d in decisions if "cost/usd_iter" in d.predicted]
        usd += expected[-1] if expected else usual_usd
    return usd
