"""Generation on the trainer's machines: planned at the beginning of an iteration, and again when no member lives.

Every rank generates on its own GPU, and only while no learner is on the device.
"""

import gc

import torch

from storage.clock import Clock
from storage.records.records import PlanRecord
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.learning.ranks import Ranks
from tasks.sampling.session.crew_watch import CrewWatch
from tasks.sampling.session.seeding_member import Seeded, TrainersMachine, is_due, is_seeded, seed, seed_again


class Generation:
    """The generation by one attempt to train an iteration. Every rank has a `Generation` and calls equal methods."""

    def __init__(
        self, store: ObjectStore, plan: PlanRecord, config: RunConfig, execution: str, clock: Clock, ranks: Ranks
    ) -> None:
        """store: a store without metering, because each member's heartbeat reports its own requests."""
        self._store = store
        self._plan = plan
        self._config = config
        self._execution = execution
        self._clock = clock
        self._ranks = ranks
        self._machine = TrainersMachine(
            rank=ranks.rank,
            ranks=ranks.world_size,
            device=ranks.device.index if ranks.world_size > 1 else None,
            execution=execution,
        )
        self._is_fruitless = False
        self._has_generated = is_seeded(plan)
        self._done = Seeded()

    def begin(self) -> None:
        """Generate if the plan says so and `is_due`: before the first batch is recorded, or if there is no crew."""
        if not is_seeded(self._plan):
            return
        if self._ranks.broadcast(self._ranks.is_first and is_due(self._store, self._plan)):
            self._add(seed(self._store, self._plan, self._config, self._machine, self._clock))

    def again(self) -> None:
        """Generate because no other member lives. Raises EngineDied."""
        self._has_generated = True
        self._add(seed_again(self._store, self._plan, self._config, self._machine, self._clock))

    def watch(self) -> CrewWatch:
        """A watch on the crew's members while the learner is on the device.

        If the last generation brought no token, the watch waits before it raises LeftAlone again.
        """
        return CrewWatch(
            self._store,
            self._plan,
            self._config.rollout,
            self._config.planning,
            self._clock,
            execution=self._execution,
            at_once=not self._is_fruitless,
        )

    def metrics(self) -> dict[str, float]:
        """Seconds of the slowest rank and tokens of all ranks; {} without generation. Every rank must call it."""
        if not self._has_generated:
            return {}
        seconds, tokens = zip(*self._ranks.gather([self._done.seconds, self._done.tokens]), strict=True)
        return {"seeding/seconds": max(seconds), "seeding/tokens": float(sum(tokens))}

    def _add(self, done: Seeded) -> None:
        self._done += done
        self._is_fruitless = not done.tokens
        # A rank without a slot, or with a dead engine, arrives long before the others.
        self._ranks.meet()


def free_device(device: torch.device) -> None:
    """Free the memory that a deleted learner held on the device, for an engine in another process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
