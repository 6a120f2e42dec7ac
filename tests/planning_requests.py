"""Requests to the planner for tests: pools, lengths, and strategies that draw them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from storage.records.planning_records import SeedingRecord
from tasks.configuration.planning import PlanningConfig
from tasks.crew_model.ownership import CrewRules
from tasks.crew_model.step_time import NOMINAL, StepTime
from tasks.planning.capacity import GroupLengths, PoolCapacity, StepWaits, TrainerCapacity
from tasks.planning.request import PlanningRequest

CURVE = StepTime(((1, 0.02), (32, 0.021), (64, 0.025), (128, 0.04), (256, 0.08)))
RULES = CrewRules(flush_interval_s=5.0, heartbeat_interval_s=5.0, claim_ttl_s=30.0)
POOLS = ("rollout", "spot", "far")


def a_pool(name: str = "rollout", **changes: Any) -> PoolCapacity:
    plain = PoolCapacity(
        name=name,
        count_min=1,
        count_max=4,
        usd_per_h=2.0,
        responses_max=64,
        step_time=CURVE,
        start_s=30.0,
    )
    return replace(plain, **changes)


def some_lengths(groups: int, *, seed: int = 0, sigma: float = 0.8) -> GroupLengths:
    expected = np.random.default_rng(seed).lognormal(6.0, sigma, groups)
    return GroupLengths("history", expected, 1.6 * expected)


def alike_lengths(groups: int) -> GroupLengths:
    return GroupLengths("none", np.full(groups, 400.0), np.full(groups, 900.0))


def a_request(*pools: PoolCapacity, groups: int = 16, **changes: Any) -> PlanningRequest:
    """With `settings` as a dictionary."""
    settings = PlanningConfig(**changes.pop("settings", {}))
    plain = PlanningRequest(
        num_generations=4, lengths=some_lengths(groups), pools=pools, settings=settings, rules=RULES
    )
    return replace(plain, **changes)


def waits(**changes: Any) -> StepWaits:
    plain = StepWaits(
        wait_train_s=0.0, wait_remote_s=0.0, train_s=100.0, rollout_s=100.0, members=4.0, members_at_end=4
    )
    return replace(plain, **changes)


@st.composite
def pools(draw: st.DrawFn) -> tuple[PoolCapacity, ...]:
    found = []
    for pool in POOLS[: draw(st.integers(0, 3))]:
        count_max = draw(st.integers(0, 4))
        found.append(
            a_pool(
                pool,
                count_min=draw(st.integers(0, 3)),
                count_max=count_max,
                usd_per_h=draw(st.sampled_from([0.0, 1.0, 3.5])),
                responses_max=draw(st.sampled_from([1, 6, 64, 1000])),
                step_time=draw(st.sampled_from([CURVE, CURVE, CURVE.scaled(2.0), CURVE.scaled(1e-4), NOMINAL])),
                start_s=draw(st.sampled_from([0.0, 40.0, 1e5])),
                losses_per_h=draw(st.sampled_from([0.0, 2.0, 1e4])),
                available=draw(st.sampled_from([None, None, 0, 1])),
            )
        )
    return tuple(found)


@st.composite
def requests(draw: st.DrawFn) -> PlanningRequest:
    """Of small iterations, with and without a trainer that generates, budgets, and a past; with what hardly happens."""
    groups = draw(st.integers(1, 12))
    lengths = draw(
        st.sampled_from(
            [
                alike_lengths(groups),
                some_lengths(groups, seed=groups),
                some_lengths(groups, sigma=0.1),
                # From one token to millions, of which nobody is sure.
                GroupLengths("ranker", np.geomspace(1.0, 1e6, groups), np.geomspace(1e3, 1e9, groups)),
            ]
        )
    )
    past = draw(st.booleans())
    seconds = st.floats(0, 300) | st.sampled_from([0.0, 1e-9, 1e7])
    settings = PlanningConfig(
        dispatch=draw(st.sampled_from(["auto", "auto", "in_turn"])),
        objective=draw(st.sampled_from(["makespan", "gpu_seconds"])),
        width=draw(st.sampled_from(["fixed", "cost", "balance"])),
        cost_weight=draw(st.floats(0, 1)),
        usd_per_iteration_max=draw(st.none() | st.floats(0.05, 1.0)),
        usd_per_run_max=draw(st.none() | st.floats(0.5, 2.0)),
        seeding=draw(st.sampled_from(["off", "auto"])),
        seeding_s_initial=draw(seconds),
        seeding_s_min=draw(st.sampled_from([0.0, 5.0])),
    )
    reserved = TrainerCapacity(
        engines=draw(st.integers(1, 3)),
        usd_per_h=draw(st.sampled_from([0.0, 8.0])),
        responses_max=32,
        step_time=draw(st.sampled_from([CURVE, CURVE.scaled(1e3), NOMINAL])),
        start_s=draw(st.sampled_from([0.0, 50.0])),
    )
    before = SeedingRecord(seeding_s=draw(st.none() | seconds), members=draw(st.integers(0, 4)), memory={"2": 9.0})
    last = waits(
        wait_train_s=draw(seconds),
        wait_remote_s=draw(seconds),
        train_s=draw(st.floats(1, 300) | st.just(0.0)),
        rollout_s=draw(seconds),
        members=draw(st.sampled_from([0.0, 1.0, 2.5, 4.0])),
        members_at_end=draw(st.integers(0, 4)),
    )
    num_generations = draw(st.integers(1, 4))
    ended = np.random.default_rng(groups).lognormal(5.0, 1.0, (groups, num_generations))
    return PlanningRequest(
        num_generations=num_generations,
        lengths=lengths,
        pools=draw(pools()),
        settings=settings,
        rules=replace(RULES, objective=settings.objective),
        keep_order=draw(st.booleans()),
        reserved=draw(st.sampled_from([None, reserved])),
        waits=last if past else None,
        seeding=before if past else None,
        width=(("rollout", draw(st.integers(0, 5))),) if past else (),
        past_lengths=(ended,) * draw(st.integers(0, 3)) if past else (),
        train_s=draw(st.none() | st.floats(1, 300) | st.sampled_from([0.0, 1e-9])),
        spent_usd=draw(st.sampled_from([0.0, 0.4])),
        usd_no_machine=draw(st.sampled_from([0.0, 0.01])),
        length_max=draw(st.sampled_from([math.inf, 900.0, 1.0])),
    )
