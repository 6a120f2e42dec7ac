"""The planner's input for each iteration: the capacity of the pools, and the figures of concluded iterations."""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from storage.records.planning_records import SeedingRecord
from tasks.forecasting.links import BYTES_PER_GBIT
from tasks.forecasting.response_lengths import Ints
from tasks.forecasting.results import SimulatedIteration
from tasks.forecasting.scenario import PoolScenario, Scenario
from tasks.history.planning_inputs import REPORTS_READ
from tasks.planning.capacity import GroupLengths, PoolCapacity, StepWaits, TrainerCapacity
from tasks.planning.request import PlanningRequest

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class _Concluded:
    """The known figures of one concluded iteration; lengths: [groups, num_generations] tokens."""

    iteration: SimulatedIteration
    waits: StepWaits
    seeding: SeedingRecord | None
    lengths: Ints


class Knowledge:
    """A run's knowledge: figures of concluded iterations alone, except the pools' step times and starts.

    As in tasks.history.planning_inputs, losses, training, lengths and the waiting for tools come from the last
    REPORTS_READ reports, and further figures from the last report.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._recent: deque[_Concluded] = deque(maxlen=REPORTS_READ)
        self._usd = 0.0

    def request(
        self,
        lengths: GroupLengths,
        available: Mapping[str, int | None],
        machines_present: Mapping[str, int],
        planned_width: Mapping[str, int] | None,
    ) -> PlanningRequest:
        """The request for the next iteration.

        Args:
            lengths: expected lengths.
            available: by pool, as PoolCapacity.available.
            machines_present: running machines by pool.
            planned_width: members by pool in the newest plan; None before the first plan.
        """
        scenario, last = self._scenario, self._recent[-1] if self._recent else None
        trainer, policy = scenario.trainer, scenario.policy
        reserved = TrainerCapacity(
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
            pools=tuple(
                self._capacity(pool, available[pool.name], machines_present[pool.name]) for pool in scenario.pools
            ),
            settings=policy.planning,
            rules=policy.crew_rules,
            reserved=reserved if trainer.engines else None,
            waits=last.waits if last else None,
            seeding=seeding,
            width=tuple(last.iteration.planned_crew.items()) if last else (),
            planned_width=None if planned_width is None else tuple(planned_width.items()),
            keep_order=policy.keep_order,
            training="at_end" if not policy.streaming else "in_order" if policy.in_order else "as_ended",
            train_s=statistics.median(each.waits.train_s for each in self._recent) if last else None,
            past_lengths=tuple(each.lengths.astype(np.float64) for each in reversed(self._recent)),
            control_s=last.iteration.control_s if last else 0.0,
            overlaps=policy.max_staleness > 0,
            crew=policy.crew,
            spent_usd=self._usd,
            usd_no_machine=last.iteration.usd_no_machine if last else 0.0,
            length_max=float(scenario.work.lengths.cap),
            tool_s_per_token=self._tool_s_per_token(lengths) if policy.plans_tools else 0.0,
        )

    def learn(
        self, iteration: SimulatedIteration, waits: StepWaits, seeding: SeedingRecord | None, lengths: Ints
    ) -> None:
        """Learn from a concluded iteration; lengths: [groups, num_generations] tokens."""
        self._recent.append(_Concluded(iteration=iteration, waits=waits, seeding=seeding, lengths=lengths))
        self._usd += iteration.usd_total

    def _tool_s_per_token(self, lengths: GroupLengths) -> float:
        """Seconds of waiting per token in the last iterations; the scenario's tools decide in the first iteration."""
        tools = self._scenario.work.tools
        if self._recent:
            waited_s = sum(each.iteration.tool_s for each in self._recent)
            return waited_s / sum(each.iteration.tokens for each in self._recent)
        return 0.0 if tools is None else tools.answers * tools.answer_s / float(lengths.expected.mean())

    def _capacity(self, pool: PoolScenario, available: int | None, machines_present: int) -> PoolCapacity:
        """The capacity of a pool; start_s is from process to weights, as in reports, without the machine's start."""
        losses = sum(each.iteration.losses[pool.name] for each in self._recent)
        machine_s = sum(sum(each.iteration.seconds[pool.name].values()) for each in self._recent)
        return PoolCapacity(
            name=pool.name,
            count_min=pool.count_min,
            count_max=pool.count,
            usd_per_h=pool.usd_per_h,
            responses_max=pool.responses_max,
            step_time=pool.step_time,
            # The weights are pulled while the process starts.
            start_s=max(pool.process_s, self._pull_s(pool)),
            machine_start_s=pool.start_s,
            kept=pool.kept,
            machines_present=machines_present,
            losses_per_h=losses / (machine_s / SECONDS_PER_HOUR) if machine_s else 0.0,
            available=available,
        )

    def _pull_s(self, pool: PoolScenario) -> float:
        """Seconds of a pull while all of the pool's machines pull."""
        policy, upload = self._scenario.policy, self._scenario.trainer.upload_gbps
        size = policy.weights_bytes
        if self._recent and pool.kept and policy.weights_delta_bytes is not None:
            size = policy.weights_delta_bytes
        gbps = pool.link_gbps if upload is None else min(pool.link_gbps, upload / max(1, pool.count))
        return size / (gbps * BYTES_PER_GBIT)
