"""A standing member: a process that works on every iteration of an execution, and keeps engine and weights warm.

The member fills the slot of its number in each plan. Between two iterations it stands by with the newest weights.
Everything else is a member's session.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from resources.pools import PoolsConfig
from resources.process import started_at_s
from resources.work_log import at_work
from storage.clock import Clock
from storage.journal.assembly import unended_responses
from storage.records import layout
from storage.records.records import CONTROL_POOL, TRAIN_POOL, PlanRecord
from storage.records.run import exists, read_plan
from storage.stores.connect import connect
from storage.stores.metered import Requests, metered, requests_of
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, StoreUnavailable
from tasks.configuration.iteration_config import config_in_force
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.session.member import (
    POLL_INTERVAL_S,
    Build,
    Equipment,
    PlannedIteration,
    check_machine,
    equipped,
    helping_slot,
    run_session,
    session_config,
)
from tasks.sampling.session.route import Route
from tasks.sampling.session.session_outcome import EngineHealth, Preempted, SessionOutcome
from tasks.sampling.session.storage_lanes import FAILURES_MAX

log = logging.getLogger(__name__)
LEASE_INTERVAL_S = 10.0


# One session on a plan. It gets the function `enough` of Session; None: the member leaves the iteration for good, as
# one does that does not stand.
Work = Callable[[PlanRecord, Callable[[], bool] | None], SessionOutcome]


@dataclass(frozen=True, kw_only=True)
class Post:
    """The duty of a standing member.

    Attributes:
        run_url: the url of the run.
        execution: the Flyte execution that advances the run.
        slot: the slot that the member fills in every plan.
        first: the first iteration.
        iterations: the number of iterations.
    """

    run_url: str
    execution: str
    slot: int
    first: int
    iterations: int

    @property
    def last(self) -> int:
        return self.first + self.iterations - 1


def stand(post: Post, notice: Callable[[], bool], clock: Clock, build: Build = build_engine) -> SessionOutcome:
    """Work on each iteration of the execution, and leave the last as other members do; returns what all sessions did.

    If the execution has a single iteration with nothing left to generate, no engine is built.

    Raises WrongGpus as `generate_slot` does, and the errors of `Standing.stand`. Before an error leaves, all tokens are
    flushed and all responses free for other members, if the store works.
    """
    store = metered(connect(post.run_url))
    plan = read_plan(store, post.first)
    first = PlannedIteration(store, plan, config_in_force(store, plan))
    check_machine(f"slot {post.slot} of {post.run_url}", first, pool_of(first.config.pools, post.slot))
    if post.iterations == 1 and not unended_responses(store, plan):
        log.info("slot %d: iteration %d has nothing left to generate", post.slot, post.first)
        return SessionOutcome.of_nothing()
    route = Route(store, post.execution, post.first, post.last)
    version = route.first_weights()
    with equipped(first, build, clock, ahead=plan.weight_version if version is None else version) as equipment:
        process = _Process(post, store, equipment, notice, clock)
        return Standing(route, process.work, process.warm, notice, clock, f"slot {post.slot}", equipment.health).stand()


def slot_in(store: ObjectStore, plan: PlanRecord, slot: int) -> int:
    """The slot of this number, unless the plan has none or gives it to the trainer's machine; then a helper's number.

    A plan that an earlier execution wrote may have another number of slots than this execution has members.
    """
    if slot < len(plan.slots) and plan.slots[slot].pool not in (TRAIN_POOL, CONTROL_POOL):
        return slot
    return helping_slot(store, plan)


def pool_of(pools: PoolsConfig, slot: int) -> str:
    """The pool whose machines run the members of a standing slot."""
    return next((name for name, slots in pools.standing_slots.items() if slot in slots), "rollout")


class Standing:
    """What a standing member does, by its route. The crash histories give it sessions and an engine in virtual time."""

    def __init__(
        self,
        route: Route,
        work: Work,
        warm: Callable[[Route], bool],
        notice: Callable[[], bool],
        clock: Clock,
        name: str,
        health: EngineHealth,
    ) -> None:
        """Create a standing member that has no session yet.

        Args:
            route: the iterations of the execution.
            work: runs one session, and keeps `health` up to date after any error.
            warm: gives the engine newer weights, and returns whether newer weights existed.
            notice: whether the machine is wanted back.
            clock: the clock of the process.
            name: the member's name in logs.
            health: the health of the engine.
        """
        self._route = route
        self._work = work
        self._warm = warm
        self._notice = notice
        self._clock = clock
        self._name = name
        self._health = health
        self._next_lease_s = clock.monotonic()

    def stand(self) -> SessionOutcome:
        """Live until nothing is left; returns what all sessions did together.

        Raises Preempted after a notice, EngineDied when the engine cannot be kept alive on this machine, and
        StoreUnavailable at the FAILURES_MAX-th failure in a row.
        """
        whole, failures = SessionOutcome.of_nothing(), 0
        while not self._notice():
            try:
                plan = self._route.next()
                if plan is not None:
                    whole += self._worked(plan)
                elif self._route.is_over or self._is_given_up():
                    log.info("%s: nothing is left of the execution", self._name)
                    return whole
                else:
                    self._stand_by()
                failures = 0
            except StoreUnavailable as error:
                failures += 1
                log.warning("%s: the store failed %d times: %s", self._name, failures, error)
                if failures >= FAILURES_MAX:
                    raise
                self._clock.sleep(POLL_INTERVAL_S)
        raise Preempted

    def _worked(self, plan: PlanRecord) -> SessionOutcome:
        """One session, which ends when the iteration is closed, or when nothing is held and the route leads away.

        Where no further iteration follows, a wait would save no start.
        """
        self._route.enter(plan.iteration)
        if not self._route.leaves(plan.iteration):
            return self._work(plan, lambda: self._route.leads_away(plan.iteration))
        outcome = self._work(plan, None)
        self._route.leave(plan.iteration)
        return outcome

    def _stand_by(self) -> None:
        """Load the weights that the next plan will probably name, or wait for a moment."""
        at_work("standing by: waiting for the next plan")
        try:
            if self._health.died or not self._warm(self._route):
                self._clock.sleep(POLL_INTERVAL_S)
        except EngineDied as error:
            # The next session restarts it, as often as the configuration allows.
            log.warning("%s: the engine died while it stood by: %s", self._name, error)
            self._health.died = True

    def _is_given_up(self) -> bool:
        """Ask for the lease at most once per LEASE_INTERVAL_S: it costs a LIST."""
        now_s = self._clock.monotonic()
        if now_s < self._next_lease_s:
            return False
        self._next_lease_s = now_s + LEASE_INTERVAL_S
        return self._route.is_given_up()


class _Process:
    """This process: the run's store, the engine, and since when its time and requests are paid for."""

    def __init__(
        self,
        post: Post,
        store: ObjectStore,
        equipment: Equipment,
        notice: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._post = post
        self._store = store
        self._equipment = equipment
        self._notice = notice
        self._clock = clock
        self._paid_since_s, self._requests_before = started_at_s(), Requests()

    def work(self, plan: PlanRecord, enough: Callable[[], bool] | None) -> SessionOutcome:
        """One session on the plan."""
        planned = PlannedIteration(self._store, plan, config_in_force(self._store, plan))
        pool = pool_of(planned.config.pools, self._post.slot)
        settings = replace(
            session_config(planned.config, slot=slot_in(self._store, plan, self._post.slot), pool=pool),
            started_at_s=self._paid_since_s,
            requests_before=self._requests_before,
        )
        if enough is not None:
            # It is paid for whether or not it decodes, so it takes what it can.
            settings = replace(settings, standing=True, idle_timeout_s=math.inf)
        outcome = run_session(planned, self._equipment, settings, self._notice, self._clock, enough)
        self._paid_since_s, self._requests_before = self._clock.wall(), requests_of(self._store)
        return outcome

    def warm(self, route: Route) -> bool:
        """Give the engine the newest weights; returns whether the engine did not hold them yet."""
        engine = self._equipment.engine
        version = route.newer_weights(engine.weight_version)
        if version is None:
            return False
        try:
            self._equipment.weights.load(engine, version, self._heed)
        except (ObjectMissing, CorruptObject):
            # Retention deletes a version as soon as a newer one is committed.
            if exists(self._store, layout.manifest(layout.weights(version))):
                raise
        return True

    def _heed(self) -> None:
        if self._notice():
            raise Preempted
