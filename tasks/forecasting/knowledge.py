"""What the planner is told before each iteration: the offers, and how the iterations concluded so far went."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from storage.planning_records import SeedingRecord
from tasks.forecasting.links import BYTES_PER_GBIT
from tasks.forecasting.results import SimulatedIteration
from tasks.forecasting.scenario import PoolScenario, Scenario
from tasks.planning.offer import CrewOffer, GroupLengths, ReservedOffer, StepWaits
from tasks.planning.request import PlanningRequest


@dataclass(frozen=True, kw_only=True)
class _Last:
    """Of the last concluded iteration."""

    waits: StepWaits
    seeding: SeedingRecord | None
    width: tuple[tuple[str, int], ...]


class Knowledge:
    """Grows with every iteration; nothing in it was not seen by then, but the pools' step times and starts."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._last: _Last | None = None
        self._usd = 0.0
        self._losses: Counter[str] = Counter()
        self._machine_h: Counter[str] = Counter()

    def request(self, lengths: GroupLengths, available: Mapping[str, int | None]) -> PlanningRequest:
        """For the next iteration; available: machines by pool, where there are fewer than were asked for."""
        scenario, last = self._scenario, self._last
        trainer, policy = scenario.trainer, scenario.policy
        reserved = ReservedOffer(
            engines=trainer.engines,
            usd_per_h=trainer.usd_per_h,
            responses_max=trainer.responses_max,
            step_time=trainer.step_time,
            start_s=trainer.process_s,
        )
        seeding = last.seeding if last else None
        if seeding is not None and not policy.seeding_memory:
            seeding = replace(seeding, memory={})
        return PlanningRequest(
            num_generations=scenario.work.num_generations,
            lengths=lengths,
            offers=tuple(self._offer(pool, available[pool.name]) for pool in scenario.pools),
            settings=policy.planning,
            reserved=reserved if trainer.engines else None,
            waits=last.waits if last else None,
            seeding=seeding,
            width=last.width if last else (),
            train_s=last.waits.train_s if last else None,
            spent_usd=self._usd,
            length_max=float(scenario.work.lengths.cap),
        )

    def learn(self, iteration: SimulatedIteration, waits: StepWaits, seeding: SeedingRecord | None) -> None:
        """From one that was concluded."""
        self._last = _Last(waits=waits, seeding=seeding, width=tuple(iteration.planned.items()))
        self._usd += iteration.usd_total
        self._losses.update(iteration.losses)
        for pool, parts in iteration.seconds.items():
            self._machine_h[pool] += sum(parts.values()) / 3600.0  # type: ignore[assignment]

    def _offer(self, pool: PoolScenario, available: int | None) -> CrewOffer:
        """Where machines stay, only the first iteration waits for them to start."""
        pull_s = self._pull_s(pool)
        machine_s = 0.0 if pool.kept and self._last else pool.start_s
        hours = self._machine_h[pool.name]
        return CrewOffer(
            pool=pool.name,
            interruptible=pool.interruptible,
            count_min=pool.count_min,
            count_max=pool.count,
            usd_per_h=pool.usd_per_h,
            responses_max=pool.responses_max,
            step_time=pool.step_time,
            start_s=machine_s + pool.process_s + pull_s,
            losses_per_h=self._losses[pool.name] / hours if hours else 0.0,
            remote_s=pull_s,
            available=available,
        )

    def _pull_s(self, pool: PoolScenario) -> float:
        """Seconds of a pull while all of the pool's machines pull."""
        policy, upload = self._scenario.policy, self._scenario.trainer.upload_gbps
        size = policy.weights_bytes
        if self._last and pool.kept and policy.weights_delta_bytes is not None:
            size = policy.weights_delta_bytes
        gbps = pool.link_gbps if upload is None else min(pool.link_gbps, upload / max(1, pool.count))
        return size / (gbps * BYTES_PER_GBIT)
