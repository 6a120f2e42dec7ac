"""The event model of a crew beside production's sessions in virtual time: makespan and machine seconds of drawn plans.

    python -m benchmarks.crew_model [--json] [--plans N] [--first N]

A plan is drawn from its number: members, engines, lengths, widths, how groups are dealt, and members that come late.
Production's sessions (claims, journal, heartbeats, rebalancing) play it on engines whose steps take as long as the
step-time curve says, on an undisturbed store in memory. Requests and weights take no time. The event model
(tasks/crew_model) plays the same plan with the same lengths, and is never told how production did. Which of two members
first asks for a response is chance, and moves the others: production plays each plan under PLAYED names of its members,
the model with as many seeds, and the means are compared. No machine is lost: what a loss costs is measured in
benchmarks.storm. Needs one core, less than 1 GiB of memory, and about five minutes.
"""

import argparse
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.reporting import Target, finish
from simulation.one_thread import threads_in_turn
from simulation.simulated_session import Machine, SimulatedSession
from simulation.virtual_time import Process, Timeline
from storage.journal.noise_keys import noise_key
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord, SamplingParams, SlotPlan
from storage.stores.memory import MemoryStore
from tasks.crew_model.crew_member import EngineModel
from tasks.crew_model.ownership import CrewRules
from tasks.crew_model.rollout_model import PlannedMember, modelled_rollout
from tasks.crew_model.step_time import StepTime
from tasks.sampling.engines.engine import Engine, GenerationRequest, TokenDelta
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.session.session_config import SessionConfig

WITHIN = 0.05
PLAYED = 4
LENGTH_MAX = 800
VOCABULARY = 50
LIMIT_S, TURNS_MAX = 1e5, 10**8
INTERVAL_S, CLAIM_TTL_S = 5.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A plan and its engines. starts_s: when each member comes. dealt: the groups of each."""

    number: int
    generations: int
    median: float
    spread: float
    step_time: StepTime
    responses_max: int
    prefill_tokens_per_s: float
    objective: Literal["makespan", "gpu_seconds"]
    starts_s: tuple[float, ...]
    dealt: tuple[tuple[int, ...], ...]

    @property
    def groups(self) -> int:
        return sum(map(len, self.dealt))

    def plan(self) -> PlanRecord:
        slots = (SlotPlan(slot=slot, pool="rollout", groups=groups) for slot, groups in enumerate(self.dealt))
        return PlanRecord(
            iteration=0,
            weight_version=0,
            run_seed=self.number,
            num_generations=self.generations,
            prompts_key="prompts",
            first_prompt=0,
            slots=tuple(slots),
            sampling=SamplingParams(max_completion_length=LENGTH_MAX, stop_token_ids=(0,)),
            config={},
            created_at_s=0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Played:
    """makespan_s: until the last response has ended. machine_s: of all members, until each left or that moment."""

    makespan_s: float
    machine_s: float


def drawn(number: int) -> Drawn:
    """The plan of this number; the same for the same number."""
    rng = random.Random(number)
    groups, members = rng.randint(4, 20), rng.randint(1, 8)
    step_s = rng.choice((0.2, 0.4, 0.8))
    responses_max = rng.choice((8, 16, 32, 64))
    knee = rng.choice((4, 8, 16))
    late_s = rng.choice((3.0, 3.0, 30.0, 90.0))
    dealt: list[list[int]] = [[] for _ in range(members)]
    uneven = rng.random() < 0.5
    for group in range(groups):
        dealt[rng.randrange(members) if uneven else group % members].append(group)
    return Drawn(
        number=number,
        generations=rng.choice((4, 8)),
        median=rng.choice((60.0, 120.0, 200.0)),
        spread=rng.choice((0.3, 0.6, 1.0)),
        step_time=StepTime(((1, step_s), (knee, 1.1 * step_s), (8 * knee, rng.choice((1.5, 3.0, 6.0)) * step_s))),
        responses_max=responses_max,
        prefill_tokens_per_s=rng.choice((50.0, 500.0)) / step_s,
        objective=rng.choice(("makespan", "makespan", "gpu_seconds")),
        starts_s=tuple(rng.uniform(0, late_s) if member else 0.0 for member in range(members)),
        dealt=tuple(tuple(groups) for groups in dealt),
    )


class _TrueClock:
    """A machine's clock without a rate or zero of its own."""

    def __init__(self, timeline: Timeline, process: Process) -> None:
        self._timeline, self._process = timeline, process

    def monotonic(self) -> float:
        return self._timeline.now_s

    def wall(self) -> float:
        return self._timeline.now_s

    def sleep(self, duration_s: float) -> None:
        self._process.sleep(duration_s)

    def true_s(self, duration_s: float) -> float:
        return duration_s


class _TimedEngine(ScriptedEngine):
    """Takes time for steps by the curve, and for prefill; notes when responses end."""

    def __init__(self, given: Drawn, clock: _TrueClock, ends_s: dict[int, float]) -> None:
        super().__init__(
            VOCABULARY,
            given.responses_max,
            median_length=given.median,
            length_spread=given.spread,
            clock=clock,
            step_time_s=given.step_time.step_s,
        )
        self._true_clock, self._ends_s, self._given, self._paid_tokens = clock, ends_s, given, 0

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        super().start(requests)
        tokens, self._paid_tokens = self.prefill_tokens - self._paid_tokens, self.prefill_tokens
        self._true_clock.sleep(tokens / self._given.prefill_tokens_per_s)

    def step(self) -> list[TokenDelta]:
        deltas = super().step()
        for delta in deltas:
            if delta.finish_reason is not None:
                self._ends_s[delta.response] = self._true_clock.monotonic()
        return deltas


def by_sessions(given: Drawn, names: int = 0) -> Played:
    """The plan played by production's sessions, under one of several names of each member."""
    timeline = Timeline(random.Random(f"order {given.number}"), LIMIT_S, TURNS_MAX)
    store, plan = MemoryStore(), given.plan()
    ends_s: dict[int, float] = {}
    left_s: dict[str, float] = {}
    errors: list[BaseException] = []

    def ended(machine: Machine, error: BaseException | None) -> None:
        left_s[machine.name] = timeline.now_s
        if error is not None:
            errors.append(error)

    def load(engine: Engine, heed: Callable[[], None]) -> None:
        heed()
        engine.load_weights(0, {})

    def life(slot: int) -> Callable[[Machine], object]:
        def live(machine: Machine) -> None:
            session = SimulatedSession(
                machine,
                store,
                plan,
                prompts=[PromptRow(str(group), (1, 2, 3), "p", {}) for group in range(given.groups)],
                engine=_TimedEngine(given, _TrueClock(timeline, machine), ends_s),
                load=load,
                config=_config(given, slot),
                notice=lambda: False,
                incarnation=machine.name,
            )
            session.run()

        return live

    with threads_in_turn():
        for slot, start_s in enumerate(given.starts_s):
            machine = Machine(timeline, f"{slot:05d}-{given.number * PLAYED + names:016x}", life(slot), ended)
            machine.clock = _TrueClock(timeline, machine)  # type: ignore[assignment]
            timeline.at(start_s, machine.start)
        over = timeline.run()
    if errors or not over or len(ends_s) < given.groups * given.generations:
        raise RuntimeError(f"plan {given.number}: {len(ends_s)} responses have ended; errors: {errors[:1]}")
    makespan_s = max(ends_s.values())
    lived_s = (
        max(0.0, min(makespan_s, end_s) - given.starts_s[int(name.split("-")[0])]) for name, end_s in left_s.items()
    )
    return Played(makespan_s=makespan_s, machine_s=sum(lived_s))


def _config(given: Drawn, slot: int) -> SessionConfig:
    return SessionConfig(
        slot=slot,
        pool="rollout",
        host="virtual",
        pid=1,
        started_at_s=given.starts_s[slot],
        flush_interval_s=INTERVAL_S,
        heartbeat_interval_s=INTERVAL_S,
        claim_ttl_s=CLAIM_TTL_S,
        idle_timeout_s=math.inf,
        objective=given.objective,
        parallel_reads=1,
    )


def by_the_model(given: Drawn, seed: int = 0) -> Played:
    """The plan played by the event model, with the lengths that its engines would draw."""
    engine = EngineModel.of(given.step_time, given.responses_max, given.prefill_tokens_per_s)
    members = [
        PlannedMember(engine=engine, start_s=start_s, groups=groups)
        for start_s, groups in zip(given.starts_s, given.dealt, strict=True)
    ]
    rules = CrewRules(
        flush_interval_s=INTERVAL_S,
        heartbeat_interval_s=INTERVAL_S,
        claim_ttl_s=CLAIM_TTL_S,
        objective=given.objective,
    )
    found = modelled_rollout(lengths_of(given), members, rules, prompt_tokens=3, seed=given.number * PLAYED + seed)
    return Played(makespan_s=found.ended_s, machine_s=sum(found.member_s))


def lengths_of(given: Drawn) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """[groups, generations] tokens."""
    script = ScriptedEngine(VOCABULARY, 1, median_length=given.median, length_spread=given.spread)
    script.load_weights(0, {})
    keys = (noise_key(given.number, 0, response) for response in range(given.groups * given.generations))
    lengths = [min(LENGTH_MAX, script.scripted_length(key)) for key in keys]
    return np.array(lengths, dtype=np.int64).reshape(given.groups, given.generations)


def compared(number: int) -> dict[str, float]:
    """The plan's row: ratios are the model's mean figure over production's."""
    given = drawn(number)
    real = _mean([by_sessions(given, names) for names in range(PLAYED)])
    model = _mean([by_the_model(given, seed) for seed in range(PLAYED)])
    return {
        "plan": number,
        "members": len(given.dealt),
        "responses": given.groups * given.generations,
        "late_s": max(given.starts_s),
        "leaves early": float(given.objective == "gpu_seconds"),
        "makespan_s": real.makespan_s,
        "makespan_ratio": model.makespan_s / real.makespan_s,
        "machine_s": real.machine_s,
        "machine_ratio": model.machine_s / real.machine_s,
    }


def _mean(played: Sequence[Played]) -> Played:
    makespan_s = statistics.fmean(each.makespan_s for each in played)
    return Played(makespan_s=makespan_s, machine_s=statistics.fmean(each.machine_s for each in played))


def targets(rows: Sequence[Mapping[str, float]]) -> list[Target]:
    found = []
    for name in ("makespan", "machine"):
        errors = [abs(row[f"{name}_ratio"] - 1) for row in rows]
        within = sum(error <= WITHIN for error in errors) / len(errors)
        found += [
            Target(f"{name}_error_median", statistics.median(errors), f"<= {WITHIN}"),
            Target(f"{name}_share_within_5_percent", within, ">= 1"),
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first plan")
    options = parser.parse_args()
    rows = [compared(number) for number in range(options.first, options.first + options.plans)]
    notes = {"plans": options.plans, "first": options.first, "interval_s": INTERVAL_S}
    finish("crew_model", rows, targets(rows), as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
