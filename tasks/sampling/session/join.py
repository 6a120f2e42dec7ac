"""Joining a run from any machine that can reach its storage: without Flyte and without a slot of the plan.

A joined member claims responses that are free or late, iteration by iteration, and may leave at any moment. Where
several iterations are open, the member goes on to the next one when it has no work, as a standing member does.
"""

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from resources.process import started_at_s
from storage.clock import Clock
from storage.records import layout
from storage.records.records import JOINED_POOL, PlanRecord
from storage.records.run import exists, next_iteration, read_plan, read_run
from storage.stores.connect import connect
from storage.stores.metered import Requests, metered, requests_of
from storage.stores.store import ObjectMissing, ObjectStore
from storage.waiting import Wait
from tasks.configuration import user_function
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.run_config import RunConfig, parse_held
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.session.member import (
    POLL_INTERVAL_S,
    Build,
    PlannedIteration,
    equipped,
    helping_slot,
    run_session,
    session_config,
)
from tasks.sampling.session.route import Route
from tasks.sampling.session.session_config import SessionConfig
from tasks.sampling.session.session_outcome import Preempted, SessionOutcome

# How long a run is waited for that has not begun.
BEGINS_S = 1800.0
LEAVES = "this machine leaves (--patience-s)"


@dataclass(frozen=True, kw_only=True)
class JoinLimits:
    """When a joined member leaves.

    Attributes:
        iterations: the number of iterations with which the member helps; None: no limit.
        time_limit_s: the member's time in all; None: no limit.
        patience_s: the longest wait for the run to begin or for a plan; None: BEGINS_S for the run to begin, and later
            run.lease_ttl_s without a sign that an execution advances the run.
    """

    iterations: int | None = None
    time_limit_s: float | None = None
    patience_s: float | None = None


def join_run(
    run_url: str,
    limits: JoinLimits,
    notice: Callable[[], bool],
    clock: Clock,
    *,
    usd_per_hour: float | None = None,
    run_tools: Collection[str] = (),
    build: Build = build_engine,
    tell: Callable[[str], None] = lambda line: None,  # noqa: ARG005
    report: Callable[[PlanRecord, SessionOutcome], None] = lambda plan, outcome: None,  # noqa: ARG005
) -> int:
    """Wait for the run to begin, help with iterations until a limit or a notice, and return the number of iterations.

    run_tools: the modules and functions ("package.module:name") of the run's `turns` that may run here. tell: gets a
    line about the functions that run here. Raises ValueError if the run names any further function, StoreDenied or
    StoreUnavailable if `run_url` cannot be read, and EngineDied when the engine cannot be kept alive on this machine.
    After a notice, and after EngineDied, everything is flushed and free for other members.
    """
    _check_run_tools(run_tools)
    store = metered(connect(run_url))
    ends_s = None if limits.time_limit_s is None else clock.monotonic() + limits.time_limit_s
    if not _has_begun(store, limits, ends_s, notice, clock):
        return 0
    plan = _next_plan(store, 0, limits, ends_s, notice, clock)
    if plan is None:
        return 0
    paid_since_s, requests_before = started_at_s(), Requests()
    planned = PlannedIteration(store, plan, config_in_force(store, plan))
    tell(_what_runs(planned.config, run_tools))
    route, helped = Route(store, None, plan.iteration, math.inf), set[int]()
    with equipped(planned, build, clock) as equipment:
        while plan is not None:
            route.enter(plan.iteration)
            helped.add(plan.iteration)
            is_last = len(helped) == limits.iterations or plan.weights_url is not None
            settings = replace(
                _settings(planned, limits, ends_s, clock, usd_per_hour),
                started_at_s=paid_since_s,
                requests_before=requests_before,
                standing=planned.config.algorithm.max_staleness > 0 and not is_last,
            )
            enough = _enough(route, plan.iteration, ends_s, clock) if settings.standing else None
            try:
                outcome = run_session(planned, equipment, settings, notice, clock, enough)
            except Preempted:
                break
            report(plan, outcome)
            paid_since_s, requests_before = clock.wall(), requests_of(store)
            # An evaluation has one iteration only.
            if is_last:
                break
            # A standing member without a patience left for an iteration that may be closed by now.
            left = None if settings.standing and limits.patience_s is None else plan.iteration
            plan = _following(store, route, left, max(helped) + 1, limits, ends_s, notice, clock)
            if plan is not None:
                planned = PlannedIteration(store, plan, config_in_force(store, plan))
    return len(helped)


def _settings(
    planned: PlannedIteration, limits: JoinLimits, ends_s: float | None, clock: Clock, usd_per_hour: float | None
) -> SessionConfig:
    return replace(
        session_config(planned.config, slot=helping_slot(planned.store, planned.plan), pool=JOINED_POOL),
        usd_per_hour=usd_per_hour,
        time_limit_s=None if ends_s is None else max(0.0, ends_s - clock.monotonic()),
        # A joined member stays while it has no work, as it also waits between two iterations.
        idle_timeout_s=math.inf if limits.patience_s is None else limits.patience_s,
    )


def _enough(route: Route, iteration: int, ends_s: float | None, clock: Clock) -> Callable[[], bool]:
    """Whether a member without work should leave an iteration: the route leads on, or the member's time is over."""
    return lambda: (ends_s is not None and clock.monotonic() >= ends_s) or route.leads_away(iteration)


def _following(
    store: ObjectStore,
    route: Route,
    left: int | None,
    later: int,
    limits: JoinLimits,
    ends_s: float | None,
    notice: Callable[[], bool],
    clock: Clock,
) -> PlanRecord | None:
    """The plan to help with after a session; waits for one from `later` on; None when it is time to leave.

    left: an open iteration to which the member does not return.
    """
    if ends_s is None or clock.monotonic() < ends_s:
        plan = route.next()
        if plan is not None and plan.iteration != left:
            return plan
    return _next_plan(store, later, limits, ends_s, notice, clock)


def _check_run_tools(run_tools: Collection[str]) -> None:
    for value in run_tools:
        if not user_function.PATTERN.fullmatch(value if ":" in value else f"{value}:name"):
            raise ValueError(f"--run-tools: value {value!r}; allowed: package.module, or package.module:function")


def _what_runs(config: RunConfig, run_tools: Collection[str]) -> str:
    """A line that says it; raises ValueError if the run names a function that is not among `run_tools`."""
    named = () if config.turns is None else config.turns.functions
    refused = [each for each in named if each not in run_tools and each.partition(":")[0] not in run_tools]
    if refused:
        modules = dict.fromkeys(each.partition(":")[0] for each in refused)
        asked = " ".join(f"--run-tools {module}" for module in modules)
        raise ValueError(
            f"turns: the run names {', '.join(refused)}, which would run on this machine; "
            f"allowed: a run without turns, or {asked} for modules that you trust"
        )
    functions = ", ".join(named) or "none that the run names"
    credentials = () if config.turns is None else config.turns.environment_variables
    seen = f"; they see {', '.join(credentials)}" if credentials else ""
    return f"here run: the engine {config.rollout.engine!r}; functions: {functions}{seen}"


def _has_begun(
    store: ObjectStore, limits: JoinLimits, ends_s: float | None, notice: Callable[[], bool], clock: Clock
) -> bool:
    """Wait for the run's first record, in case the machine starts before the run does; False when it is time to leave.

    A wrong url looks like a run that has not begun, so the reason for the wait is logged at once. Errors of the store,
    such as StoreDenied, are raised.
    """
    patience_s = BEGINS_S if limits.patience_s is None else limits.patience_s
    left_s = math.inf if ends_s is None else ends_s - clock.monotonic()
    what = f"a run to begin at {store.url}, which holds no {layout.RUN} yet"
    waiting = Wait(what, clock, min(patience_s, left_s), f"then {LEAVES}", silent_s=0.0)
    while not notice():
        with suppress(ObjectMissing):
            read_run(store)
            return True
        if waiting.is_over:
            return False
        waiting.pause(POLL_INTERVAL_S)
    return False


def _next_plan(
    store: ObjectStore,
    first: int,
    limits: JoinLimits,
    ends_s: float | None,
    notice: Callable[[], bool],
    clock: Clock,
) -> PlanRecord | None:
    """Wait for the plan of the first open iteration from `first` on; None when it is time to leave.

    The time to leave is a limit, a notice, or the closing of an evaluation's iteration.
    """
    waiting, sign = _waiting_for_plan(store, limits, clock), b""
    while not notice():
        if ends_s is not None and clock.monotonic() >= ends_s:
            return None
        iteration = max(next_iteration(store), first)
        # Where rollout runs ahead, the next iteration is planned before this one is committed. The trainer waits for
        # the oldest open one.
        while exists(store, layout.closed(iteration)):
            if iteration == 0 and read_plan(store, iteration).weights_url is not None:
                # An evaluation has one iteration only, and this one has ended.
                return None
            iteration += 1
        with suppress(ObjectMissing):
            return read_plan(store, iteration)
        if waiting.is_over:
            return None
        if limits.patience_s is None and (seen := _lease_beat(store)) != sign:
            sign = seen
            waiting.saw_life()
        waiting.pause(POLL_INTERVAL_S)
    return None


def _waiting_for_plan(store: ObjectStore, limits: JoinLimits, clock: Clock) -> Wait:
    what = f"the next iteration of {store.url} to be planned"
    if limits.patience_s is not None:
        return Wait(what, clock, limits.patience_s, f"then {LEAVES}")
    ttl_s = parse_held(read_run(store).config).run.lease_ttl_s
    return Wait(what, clock, ttl_s, f"unless the run shows a sign of life before, {LEAVES}")


def _lease_beat(store: ObjectStore) -> bytes:
    """The lease's beat, which the execution that advances the run rewrites at an interval; empty without a beat."""
    try:
        return store.get(layout.LEASE_BEAT)
    except ObjectMissing:
        return b""
