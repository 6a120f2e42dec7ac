"""Collecting: an iteration's groups are followed, graded and recorded on a machine without a GPU.

Another process replays the records and trains. The collector does not change what is learned, because every task trains
on micro-batches exactly as recorded. With placement "pod" a collector stops when the train phase is due, and the train
task records the rest, so reserved machines are held for little more than the phase. With "shared" and "standing" the
collector records every group, because a host never grades, and waits until a host has trained.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack

from resources.work_log import at_work
from storage.clock import Clock
from storage.errors import GleanerError
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import DueRecord
from storage.fleet.phase_failure import phase_failure
from storage.fleet.seats import newest_seat
from storage.records import layout, model_files, prompt_table, records
from storage.records.hints import CollectedRecord
from storage.records.records import PlanRecord, TrainingRecord
from storage.records.run import connect_to_run, exists, is_trained, read_plan
from storage.stores.connect import connect
from storage.stores.metered import MeteredStore
from storage.stores.store import ObjectMissing, ObjectStore, StorageError
from storage.waiting import Wait
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.run_config import RunConfig
from tasks.learning.lease import keep_lease
from tasks.learning.opened_batches import opened_batches
from tasks.sampling.session.crew_watch import CrewWatch

log = logging.getLogger(__name__)
HOST_LOOK_INTERVAL_S = 10.0
LOOKS_PER_TIMEOUT = 10


class PhaseFailed(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """The host that trained the iteration failed in a way in which every attempt would fail."""


class NoHost(GleanerError, TimeoutError):  # noqa: N818 - reads as what happened
    """No host lives that could train the iteration; a later attempt may find one."""


def collect(run_url: str, iteration: int, execution: str, clock: Clock) -> None:
    """Record groups until the train phase is due: when the share `phase_start_share` of the groups is recorded.

    Raises GroupTimeout, GradingError, CrewLost, CorruptObject and StoreUnavailable.
    """
    store = MeteredStore(connect_to_run(run_url))
    # After either of these nothing is left to record.
    if any(exists(store, key) for key in (layout.closed(iteration), layout.report(iteration))):
        return
    plan, config = _planned(store, iteration)
    with keep_lease(store, execution, config.run.lease_ttl_s, clock):
        _record(store, plan, config, execution, clock)


def collect_and_wait(run_url: str, iteration: int, execution: str, clock: Clock) -> TrainingRecord:
    """Record all groups, say when the train phase is due, and wait until a host has trained it.

    Raises what `collect` raises, PhaseFailed, and NoHost if no host lives for `trainer.group_timeout_s`.
    """
    store = MeteredStore(connect_to_run(run_url))
    if not is_trained(store, iteration):
        plan, config = _planned(store, iteration)

        def say_due(share: float) -> None:
            due = DueRecord(iteration=iteration, groups=round(share * plan.num_groups))
            records.commit(store, layout.due(iteration), due)

        with keep_lease(store, execution, config.run.lease_ttl_s, clock):
            _record(store, plan, config, execution, clock, say_due)
            _await_host(store, config, iteration, clock)
    return records.read(store, TrainingRecord, layout.training(iteration))


def _planned(store: ObjectStore, iteration: int) -> tuple[PlanRecord, RunConfig]:
    plan = read_plan(store, iteration)
    return plan, config_in_force(store, plan)


def _record(
    store: MeteredStore,
    plan: PlanRecord,
    config: RunConfig,
    execution: str,
    clock: Clock,
    say_due: Callable[[float], None] | None = None,
) -> None:
    """Record groups until the phase is due, or every group if `say_due` is given, and record seconds and requests.

    say_due: called once, when the phase is due, with the share of the groups that is recorded.
    """
    began_s = clock.monotonic()

    def note_spent() -> None:
        # Only the first record is kept. An attempt after the iteration is closed would have nothing to measure, so the
        # record comes before.
        spent = CollectedRecord(
            iteration=plan.iteration,
            seconds=clock.monotonic() - began_s,
            puts=store.requests.puts,
            gets=store.requests.gets,
        )
        records.commit(store, layout.collected(plan.iteration), spent)

    watch = CrewWatch(store, plan, config.rollout, config.planning, clock, execution=execution)
    with ExitStack() as stack:
        folder = stack.enter_context(model_files.downloaded(store))
        prompts = prompt_table.read_prompts(store, plan)
        batches = stack.enter_context(
            opened_batches(store, plan, config, prompts, folder, clock, watch.check, note_spent)
        )
        is_due = False
        for _ in batches:
            if not is_due and batches.share_recorded >= config.phase_start_share:
                is_due = True
                if say_due is None:
                    break
                say_due(batches.share_recorded)
    log.info("iteration %d: %.0f %% of the groups are recorded", plan.iteration, 100 * batches.share_recorded)
    if batches.share_recorded < 1:
        note_spent()


def _await_host(store: ObjectStore, config: RunConfig, iteration: int, clock: Clock) -> None:
    """Return when the iteration is trained."""
    sign, limit_s = b"", config.trainer.group_timeout_s
    host, missing = _host_in_words(config)
    what = f"{host} to train iteration {iteration}"
    then = "this task ends then if no host shows a sign of life before (trainer.group_timeout_s)"
    waiting = Wait(what, clock, limit_s, then)
    at_work("all groups are recorded", waiting.described)
    next_look_s = clock.monotonic()
    while not is_trained(store, iteration):
        failure = phase_failure(store, iteration)
        if failure is not None:
            raise PhaseFailed(f"iteration {iteration} could not be trained: {failure}")
        now_s = clock.monotonic()
        if now_s >= next_look_s:
            next_look_s = now_s + min(HOST_LOOK_INTERVAL_S, limit_s / LOOKS_PER_TIMEOUT)
            seen = _sign_of_host(config)
            if seen != sign:
                sign = seen
                waiting.saw_life()
        if waiting.is_over:
            raise NoHost(f"iteration {iteration} waits for {missing.format(f'for {limit_s:.0f} s')}")
        waiting.pause(config.rollout.poll_interval_s)


def _host_in_words(config: RunConfig) -> tuple[str, str]:
    """The name of the run's trainer, and a sentence with a cure for its absence; `{}` stands for the duration."""
    if config.trainer.is_external:
        return "the external trainer", (
            "the program that trains, which has shown no sign of life {}; it opens the run by: "
            f"gleaner.rollouts({config.run.url!r})"
        )
    if config.trainer.placement == "standing":
        return "the standing trainer", (
            "the standing trainer, which has shown no sign of life {}; it is the node 'trainer' of the execution, on "
            "pools.train: look why it has no machine, or why it ended"
        )
    fleet = config.trainer.fleet
    return f"a host of the fleet {fleet}", (
        f"a host: none of the fleet {fleet} that could train this run has shown a sign of life {{}}; start one by: "
        f"gleaner fleet host {fleet}"
    )


def _sign_of_host(config: RunConfig) -> bytes:
    """The heartbeat of the host that has the run's seat; b"" without a seat, or if the fleet cannot be read.

    Of an external trainer, the heartbeat of the program.
    """
    try:
        if config.trainer.is_external:
            return connect(config.run.url).get(layout.EXTERNAL_BEAT, 0, layout.BEAT_BYTES_MAX)
        fleet = connect(config.trainer.fleet_of(config.run.url) or "")
        seat = newest_seat(fleet, fleet_layout.run_id(config.run.url))
        return b"" if seat is None else fleet.get(fleet_layout.alive(seat.host))
    except (ObjectMissing, StorageError):
        return b""
