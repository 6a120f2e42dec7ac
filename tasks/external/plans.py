"""Who plans and concludes an external trainer's steps: the program itself, or a Flyte execution that it follows.

A program that plans holds the run's lease. A program that follows writes a sign of life instead, for which the
execution's node `train` looks.
"""

import gc
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol
from weakref import WeakValueDictionary

from storage.clock import Clock
from storage.errors import WrongInputError
from storage.process_identity import process_name
from storage.records import layout
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord, nonce
from storage.records.run import RunBusy, acquire_lease, exists, first_open, read_plan, release_lease
from storage.stores.connect import place
from storage.stores.store import ObjectMissing, ObjectStore, StorageError
from storage.waiting import Wait
from tasks.concluding.iteration import commit_and_report
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.references import PlanReference
from tasks.configuration.run_config import RunConfig
from tasks.learning.lease import BEATS_PER_TTL, keep_lease
from tasks.learning.opened_batches import opened_batches
from tasks.learning.recorded_batches import Batches, FollowedBatches
from tasks.preparing.iteration import is_dead_holder, prepare
from tasks.prompts.prompt import PromptSet
from tasks.sampling.session.crew_watch import CrewWatch

log = logging.getLogger(__name__)
# In a sign of life, before the name of its program.
_PROGRAM = b'"program":'


class WrongStep(WrongInputError):  # noqa: N818 - reads as what happened
    """The step, or the order of calls, is not one that the run can take now."""


class NoPlan(WrongInputError):  # noqa: N818 - reads as what happened
    """No execution plans the step; the same call waits again."""


class Plans(Protocol):
    """What differs between a program that plans and a program that follows an execution."""

    def plan(self, step: int, submitted: PromptSet | None) -> None:
        """Return when the step is planned; raises WrongStep for a step that cannot be planned now."""
        ...

    @contextmanager
    def batches(self, plan: PlanRecord, prompts: Sequence[PromptRow], folder: Path) -> Iterator[Batches]:
        """The micro-batches of a step that is not closed; folder: the run's model files."""
        ...

    def hold(self) -> None:
        """Keep other programs from advancing the run; raises RunBusy if one does."""
        ...

    def conclude(self, step: int) -> None:
        """Conclude a step whose version is published, if that is this program's to do."""
        ...

    def close(self) -> None:
        """Let another program take the run at once."""
        ...


class OwnPlans:
    """Plans, records and concludes the steps in this process."""

    # Of this process, by the name in the lease and the run's place. Whoever is dropped without `close` holds no more.
    _holders: ClassVar["WeakValueDictionary[tuple[str, ...], OwnPlans]"] = WeakValueDictionary()

    def __init__(self, store: ObjectStore, config: RunConfig, clock: Clock) -> None:
        self._store, self._config, self._clock = store, config, clock
        self._execution = process_name()
        self._stack = ExitStack()
        self._holds_lease = False

    def plan(self, step: int, submitted: PromptSet | None) -> None:
        first = first_open(self._store)
        ahead = self._config.algorithm.max_staleness
        if not first <= step <= first + ahead or (step > first and not exists(self._store, layout.plan(step - 1))):
            raise WrongStep(
                f"step: value {step}; allowed now: {first}" + (f" to {first + ahead}, in order" if ahead else "")
            )
        self._check_alone()
        with _kept_generator():
            prepare(self._config, self._execution, self._clock, ahead=step - first, submitted=submitted)
        self._keep()

    def hold(self) -> None:
        self._check_alone()
        # Also by a program that holds the lease: another one succeeds a program that was suspended for long.
        known_dead = partial(is_dead_holder, self._store.url)
        acquire_lease(self._store, self._execution, self._config.run.lease_ttl_s, self._clock, known_dead)
        self._keep()

    def _check_alone(self) -> None:
        """Raise RunBusy if another one of this process, which has the same name, holds the lease."""
        if self._holders.get(self._key, self) is not self:
            # One that was dropped may be in a cycle, as a trainer and its callbacks are.
            gc.collect()
        if self._holders.get(self._key, self) is not self:
            raise RunBusy(
                f"{self._store.url} is being advanced by another gleaner.rollouts of this process; allowed: one, so "
                "leave the `with` of that one first, or drop its trainer"
            )

    @property
    def _key(self) -> tuple[str, ...]:
        return (self._execution, *place(self._store.url))

    def _keep(self) -> None:
        if not self._holds_lease:
            self._check_alone()
            self._holders[self._key] = self
            self._holds_lease = True
            ttl_s = self._config.run.lease_ttl_s
            self._stack.enter_context(keep_lease(self._store, self._execution, ttl_s, self._clock))

    @contextmanager
    def batches(self, plan: PlanRecord, prompts: Sequence[PromptRow], folder: Path) -> Iterator[Batches]:
        if not self._holds_lease:
            raise WrongStep(f"step {plan.iteration}: value of next; allowed with submitted prompts: after its submit")
        config = config_in_force(self._store, plan)
        watch = CrewWatch(self._store, plan, config.rollout, config.planning, self._clock, execution=self._execution)
        with opened_batches(self._store, plan, config, prompts, folder, self._clock, watch.check) as batches:
            yield batches

    def conclude(self, step: int) -> None:
        if exists(self._store, layout.report(step)):
            return
        reference = PlanReference(
            run_url=self._config.run.url,
            iteration=step,
            weight_version=read_plan(self._store, step).weight_version,
            execution=self._execution,
        )
        outcome, _ = commit_and_report(reference, last=False)
        log.info("committed: %s", outcome.measured)

    def close(self) -> None:
        self._stack.close()
        if self._holds_lease:
            self._holds_lease = False
            try:
                release_lease(self._store, self._execution)
            finally:
                if self._holders.get(self._key) is self:
                    del self._holders[self._key]


@contextmanager
def _kept_generator() -> Iterator[None]:
    """Leave the generator of random numbers as it was; the first plan of a run, unlike others, tries the model."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


class FollowedPlans:
    """Follows a Flyte execution, which plans, records and concludes."""

    def __init__(self, store: ObjectStore, config: RunConfig, clock: Clock) -> None:
        self._store, self._config, self._clock = store, config, clock
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        # The sign of life of another program that follows the execution, too.
        self._successor = b""

    def plan(self, step: int, submitted: PromptSet | None) -> None:
        del submitted
        if step < 0:
            raise WrongStep(f"step: value {step}; allowed: at least 0")
        self.hold()
        waits = self._waits_for(
            f"step {step} of {self._store.url} to be planned", f"step {step} of {self._store.url} is not planned"
        )
        while not exists(self._store, layout.plan(step)):
            waits(True)
            self._clock.sleep(self._config.rollout.poll_interval_s)

    @contextmanager
    def batches(self, plan: PlanRecord, prompts: Sequence[PromptRow], folder: Path) -> Iterator[Batches]:
        del prompts, folder
        what = f"groups of step {plan.iteration} of {self._store.url} to be recorded by the execution's node 'train'"
        waits = self._waits_for(what, f"groups of step {plan.iteration} of {self._store.url} are not recorded")
        yield FollowedBatches(self._store, plan, self._clock, self._config.rollout.poll_interval_s, waits)

    def hold(self) -> None:
        # The execution has the lease.
        if self._successor:
            told = self._successor.decode(errors="replace")
            raise RunBusy(f"{self._store.url} is trained by a program that began later ({told}); allowed: one program")
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._beat, name="external trainer", daemon=True)
            self._thread.start()

    def conclude(self, step: int) -> None:
        """The execution's node `conclude` does."""

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread, self._successor = None, b""

    def _waits_for(self, what: str, lack: str) -> Callable[[bool], None]:
        """A function to call with True ahead of each pause of a wait, and with False when what is awaited is there.

        It speaks, if it is time to, and raises NoPlan, which begins with `lack`, when no execution has given a sign of
        life for trainer.group_timeout_s.
        """
        limit_s, sign = self._config.trainer.group_timeout_s, b""
        waiting = Wait(what, self._clock, limit_s, "the call ends then unless an execution gives a sign of life before")

        def waits(is_waiting: bool) -> None:
            nonlocal sign
            self.hold()
            seen = self._sign(layout.LEASE_BEAT)
            if not is_waiting or seen != sign:
                sign = seen
                waiting.saw_life()
            if waiting.is_over:
                raise NoPlan(
                    f"{lack}, and no execution has given a sign of life for {limit_s:.0f} s (trainer.group_timeout_s)"
                )
            if is_waiting:
                waiting.speak()

        return waits

    def _sign(self, key: str) -> bytes:
        try:
            return self._store.get(key, 0, layout.BEAT_BYTES_MAX)
        except ObjectMissing:
            return b""

    def _beat(self) -> None:
        name = json.dumps(f"{process_name()} {nonce()[:8]}")
        known = set[bytes]()
        while True:
            try:
                found = self._sign(layout.EXTERNAL_BEAT)
                program = found.partition(_PROGRAM)[2]
                if known and found and program not in known:
                    # Of two programs the later one goes on, as after a death of the earlier one, which cannot be told.
                    self._successor = found
                    return
                # A write may arrive late: one by this program, or the last one by the program before.
                known = known or {program, f"{name}}}".encode()}
                mine = f'{{"at_s":{self._clock.wall():.3f},{_PROGRAM.decode()}{name}}}'.encode()
                self._store.put(layout.EXTERNAL_BEAT, mine)
            except StorageError as error:
                log.warning("the sign of life of this program could not be written: %s", error)
            if self._ended.wait(min(10.0, self._config.trainer.group_timeout_s / BEATS_PER_TTL)):
                return
