"""The standing trainer of a run: a host whose fleet has a single run, for the duration of an execution.

A standing trainer differs from a shared host in two ways: no limit on the time of a phase, as in a train task, and
knowledge of the execution's end.
"""

import logging
import math

from storage.clock import Clock, SystemClock
from storage.fleet import fleet_layout
from storage.records import layout
from storage.records.run import connect_to_run, exists, lease_holder, read_plan
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, StorageError
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.references import PlanReference
from tasks.sharing.host_settings import HostSettings
from tasks.sharing.serving import serve

log = logging.getLogger(__name__)
LOOK_INTERVAL_S = 2.0
LEASE_LOOKS = 5


def stand(plan: PlanReference, iterations: int) -> bool:
    """Train the phases of an execution's iterations; returns whether the execution needs no trainer any more.

    False: SIGTERM came earlier, and a replacement machine should go on. plan: the execution's first iteration. Raises
    the errors of reading the configuration, and LookupError if the run has no fleet of its own.
    """
    store, clock = connect_to_run(plan.run_url), SystemClock()
    config = config_in_force(store, read_plan(store, plan.iteration))
    end = ExecutionEnd(store, plan.execution, plan.iteration + iterations - 1, clock)
    serve(
        fleet_layout.standing(config.run.url),
        memory_gib=0.0,
        devices=config.trainer.nproc_per_node,
        usd_per_hour=config.pools.train.price_usd_per_h,
        settings=HostSettings(poll_interval_s=config.rollout.poll_interval_s, overtime_s_min=math.inf),
        is_over=end.has_come,
    )
    return end.has_come()


class ExecutionEnd:
    """The end of an execution: the last weights are published, or a later execution advances the run."""

    def __init__(self, store: ObjectStore, execution: str, last: int, clock: Clock) -> None:
        """last: the execution's last iteration."""
        self._store = store
        self._execution = execution
        self._last = last
        self._clock = clock
        self._looks = 0
        self._next_look_s = clock.monotonic()
        self._has_come = False

    def has_come(self) -> bool:
        """Whether nothing is left to train. Cheap to call: reads the store at most every LOOK_INTERVAL_S seconds."""
        now_s = self._clock.monotonic()
        if not self._has_come and now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_INTERVAL_S
            try:
                self._has_come = self._look()
            except (StorageError, ObjectMissing, CorruptObject) as error:
                log.warning("whether the execution has ended cannot be seen: %s", error)
        return self._has_come

    def _look(self) -> bool:
        """Costs one GET, and at every LEASE_LOOKS-th look a LIST and a second GET, to notice a lost lease."""
        is_published = exists(self._store, layout.manifest(layout.weights(self._last + 1)))
        self._looks += 1
        if is_published or self._looks % LEASE_LOOKS:
            return is_published
        return lease_holder(self._store) != self._execution
