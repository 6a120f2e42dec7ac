"""A run's directory: identity, history of committed iterations, and the lease for advancing the run.

A report commits an iteration; the number of reports is the next iteration. Nothing depends on which process executes.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from storage.clock import Clock
from storage.errors import GleanerError
from storage.records import layout, records
from storage.records.evaluations import signs_of_life
from storage.records.lineage import PromptsOrigin, VersionOrigin
from storage.records.records import STRICT, PlanRecord, ReportRecord, RunRecord, SettingsRecord, nonce
from storage.records.sources import HubSource
from storage.stores.connect import connect
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing, ObjectStore
from storage.waiting import Progress, Wait, no_progress

log = logging.getLogger(__name__)
LEASE_LOOK_INTERVAL_S = 2.0
# Signs of life are many objects; the lease is one.
SIGNS_LOOK_INTERVAL_MAX_S = 30.0
_REPORT = re.compile(rf"{layout.ITERATIONS}\d{{6,}}/report\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """Names the execution that may advance the run."""

    KIND: ClassVar[str] = "lease"
    __pydantic_config__ = STRICT
    holder: str
    released: bool = False
    nonce: str = field(default_factory=nonce)


class RunBusy(ConflictingRecord):
    """Another execution advances this run."""


class AnotherRun(ConflictingRecord):
    """The directory holds a run of another configuration, or of other model files."""

    def __init__(self, url: str, differences: Iterable[str]) -> None:
        reasons = "\n".join(f"  {line}" for line in differences)
        super().__init__(f"{url} holds a run of another configuration; nothing was changed:\n{reasons}")


class ConcludedByAnother(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """Another process concluded the iteration while this process worked on it, for example after a long freeze.

    Objects needed by this process may be deleted already.
    """

    def __init__(self, iteration: int, doing: str) -> None:
        super().__init__(
            f"iteration {iteration} was concluded by another execution or attempt while this one {doing}; nothing of "
            "this attempt is used"
        )


def open_run(
    store: ObjectStore,
    *,
    config: Mapping[str, Any],
    digest: str,
    vocab_size: int,
    model_files: Mapping[str, str],
    clock: Clock,
    explain: Callable[[Mapping[str, Any]], list[str]],
    sources: Mapping[str, HubSource] | None = None,
    origin: VersionOrigin | None = None,
    prompts_origin: PromptsOrigin | None = None,
) -> RunRecord:
    """Create run.json, or accept an existing run.json of the same run.

    model_files: the digests of the files below `model/`, which must be stored first. sources: repositories of the hub,
    with rows stored first; None: as the run has them. origin, prompts_origin: what a new run has of other
    runs. explain: gets the stored configuration and returns the
    differences that are not allowed. Raises AnotherRun for such a difference and for a different model file. Nothing is
    overwritten.
    """
    mine = RunRecord(
        config=dict(config),
        digest=digest,
        vocab_size=vocab_size,
        model_files=dict(model_files),
        sources=dict(sources or {}),
        origin=origin,
        prompts_origin=prompts_origin,
        created_at_s=clock.wall(),
    )
    if records.commit(store, layout.RUN, mine):
        return mine
    theirs = read_run(store)
    differences = [] if theirs.digest == digest else explain(theirs.config)
    for name in sorted({*model_files, *theirs.model_files}):
        if model_files.get(name) != theirs.model_files.get(name):
            differences.append(f"{layout.model_file(name)}: it differs, or only one of both has it")
    if sources is not None:
        for name in sorted({*sources, *theirs.sources}):
            if sources.get(name) != theirs.sources.get(name):
                differences.append(f"{name}: another commit of the hub, or only one of both has it")
    if origin is not None and theirs.origin != origin:
        differences.append("run.from: the version has another digest there")
    if prompts_origin is not None and theirs.prompts_origin != prompts_origin:
        differences.append("data.from: the other run knew of other responses there")
    if differences:
        raise AnotherRun(store.url, differences)
    return theirs


def read_run(store: ObjectStore) -> RunRecord:
    """The run's identity, run.json; raises ObjectMissing, and CorruptObject for a run of another format."""
    return records.read(store, RunRecord, layout.RUN)


def holds_run(store: ObjectStore) -> bool:
    """Whether there is a run. Raises CorruptObject for a run of another format, which no command may touch."""
    try:
        read_run(store)
    except ObjectMissing:
        return False
    return True


def connect_to_run(url: str) -> ObjectStore:
    """The store of a run that exists. A command about a run begins here, before it reads or writes anything else.

    Raises LookupError if there is no run at `url`, CorruptObject for a run of another format, and what `connect` does.
    """
    store = connect(url)
    if not holds_run(store):
        raise LookupError(f"{store.url} holds no run")
    return store


def reports(store: ObjectStore, progress: Progress = no_progress) -> list[ReportRecord]:
    """The reports of all committed iterations, in order; raises what `count_committed` does.

    progress: called before each, with its number and how many there are.
    """
    count = count_committed(store)
    found = []
    try:
        for index in range(count):
            progress("reading reports", index, count)
            found.append(read_report(store, index))
    except ObjectMissing as error:
        raise CorruptObject(error.key, f"it is missing, although {layout.report(count - 1)!r} is there") from None
    return found


def count_committed(store: ObjectStore) -> int:
    """`next_iteration` for people: raises CorruptObject if a report is missing, although a later one is there."""
    count = next_iteration(store)
    # Of a healthy run these are the keys of the iterations ahead. "~" sorts behind every key.
    later = store.list(layout.ITERATIONS, after=f"{layout.iteration(count)}~")
    found = next((key for key in later if _REPORT.fullmatch(key)), None)
    if found is not None:
        raise CorruptObject(layout.report(count), f"it is missing, although {found!r} is there")
    return count


def read_report(store: ObjectStore, iteration: int) -> ReportRecord:
    """The report of one iteration; raises ObjectMissing before its commit."""
    return records.read(store, ReportRecord, layout.report(iteration))


def next_iteration(store: ObjectStore) -> int:
    """The first iteration without a report. Committed iterations are contiguous: bisection needs few requests."""
    low, step = 0, 1
    while exists(store, layout.report(low + step - 1)):
        low, step = low + step, step * 2
    high = low + step - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if exists(store, layout.report(middle)) else (low, middle)
    return low


def first_open(store: ObjectStore) -> int:
    """The first iteration without a report, 0 without a run; raises CorruptObject for a run of another format."""
    return next_iteration(store) if holds_run(store) else 0


def read_plan(store: ObjectStore, iteration: int) -> PlanRecord:
    """The plan of one iteration; raises ObjectMissing if there is none yet."""
    return records.read(store, PlanRecord, layout.plan(iteration))


def plans_in_flight(store: ObjectStore) -> list[PlanRecord]:
    """The plans of uncommitted iterations, in order: one as a rule, more if rollout runs ahead."""
    plans: list[PlanRecord] = []
    iteration = next_iteration(store)
    while True:
        try:
            plans.append(read_plan(store, iteration + len(plans)))
        except ObjectMissing:
            return plans


def next_prompt(store: ObjectStore, iteration: int) -> int:
    """The first prompt of an iteration: the end of the previous iteration by its report, else by its plan.

    Both agree if every group of a plan is trained. Raises ObjectMissing if neither exists.
    """
    if iteration == 0:
        return 0
    try:
        return read_report(store, iteration - 1).next_prompt
    except ObjectMissing:
        before = read_plan(store, iteration - 1)
        return before.first_prompt + num_drawn(before)


def num_drawn(plan: PlanRecord) -> int:
    """The number of groups whose prompts come from the run's own data: all but the last, replayed ones."""
    return plan.num_groups - len(plan.replayed)


def published_version(store: ObjectStore, newest: int, oldest: int) -> int | None:
    """The newest complete weight version from `newest` down to `oldest`; None if there is none."""
    versions = range(newest, max(0, oldest) - 1, -1)
    return next((version for version in versions if exists(store, layout.manifest(layout.weights(version)))), None)


def read_settings(store: ObjectStore, iteration: int) -> SettingsRecord | None:
    """What the last execution that worked on an iteration has set; None if there is no record of it."""
    try:
        return records.read(store, SettingsRecord, layout.settings(iteration))
    except ObjectMissing:
        return None


def execution_of(store: ObjectStore, iteration: int) -> str | None:
    """The execution that works on an iteration; None if none has begun it."""
    settings = read_settings(store, iteration)
    return None if settings is None else settings.execution


def exists(store: ObjectStore, key: str) -> bool:
    """Whether an object exists, by reading its first byte."""
    try:
        store.get(key, 0, 1)
    except ObjectMissing:
        return False
    return True


def is_trained(store: ObjectStore, iteration: int) -> bool:
    """Whether the iteration needs no training any more: its weights are published, or it is committed.

    The report counts too, because a committed iteration's weights may have been deleted since.
    """
    return any(exists(store, key) for key in (layout.manifest(layout.weights(iteration + 1)), layout.report(iteration)))


def acquire_lease(
    store: ObjectStore,
    holder: str,
    ttl_s: float,
    clock: Clock,
    known_dead: Callable[[str], bool] = lambda _: False,
) -> None:
    """Become the execution that advances this run; raises RunBusy if another one does.

    An earlier holder is succeeded if it releases the lease, if `known_dead` says that it has ended, or if its beat and
    what crews and graders write stay the same for `ttl_s` on this process's clock. A wait for that is logged. Of two
    successors that race for an epoch, the loser raises RunBusy. `known_dead` may raise RunBusy for a holder that lives.
    """
    epoch, lease = _last_lease(store)
    if lease is not None and lease.holder == holder and not lease.released:
        return
    if lease is not None and not lease.released and not known_dead(lease.holder):
        epoch = _await_lease(store, epoch, lease.holder, ttl_s, clock)
    record = LeaseRecord(holder=holder)
    if not records.commit(store, layout.lease(epoch + 1), record):
        raise RunBusy(f"{store.url} was taken over by another execution at this moment")
    beat_lease(store, holder, clock)


def beat_lease(store: ObjectStore, holder: str, clock: Clock) -> None:
    """Show that the holder of the lease lives."""
    store.put(layout.LEASE_BEAT, f'{{"holder":"{holder}","at_s":{clock.wall():.3f}}}'.encode())


def release_lease(store: ObjectStore, holder: str) -> None:
    """Let the next execution begin at once; does nothing if `holder` does not hold the lease."""
    epoch, lease = _last_lease(store)
    if lease is not None and lease.holder == holder and not lease.released:
        records.commit(store, layout.lease(epoch + 1), LeaseRecord(holder=holder, released=True))


def lease_holder(store: ObjectStore) -> str | None:
    """The execution that holds the lease on the run; None if there is none."""
    _, lease = _last_lease(store)
    return None if lease is None or lease.released else lease.holder


def _last_lease(store: ObjectStore) -> tuple[int, LeaseRecord | None]:
    keys = [key for key in store.list(layout.LEASE) if key != layout.LEASE_BEAT]
    if not keys:
        return 0, None
    epoch = int(keys[-1].removeprefix(layout.LEASE).removesuffix(".json"))
    return epoch, records.read(store, LeaseRecord, keys[-1])


def _await_lease(store: ObjectStore, epoch: int, holder: str, ttl_s: float, clock: Clock) -> int:
    """Wait until the lease of this epoch is released, or its holder is silent for `ttl_s`; returns the last epoch.

    Raises RunBusy at the first sign of life.
    """
    then = "this one begins when that releases it, or then if that gives no sign of life before (run.lease_ttl_s)"
    waiting = Wait(f"{store.url}, which is held by execution {holder!r}", clock, ttl_s, then, silent_s=0.0)
    waiting.speak()
    begin, before = clock.monotonic(), _signs_of_life(store)
    next_signs = begin + LEASE_LOOK_INTERVAL_S
    while not waiting.is_over:
        waiting.pause(LEASE_LOOK_INTERVAL_S)
        newest, lease = _last_lease(store)
        if newest != epoch and lease is not None:
            if lease.released:
                return newest
            raise RunBusy(f"{store.url} was taken over by execution {lease.holder!r} at this moment")
        now = clock.monotonic()
        if now >= next_signs or waiting.is_over:
            if _signs_of_life(store) != before:
                raise RunBusy(f"{store.url} is being advanced by execution {holder!r}; try again when it has ended")
            next_signs = now + min(now - begin, SIGNS_LOOK_INTERVAL_MAX_S)
    return epoch


def _signs_of_life(store: ObjectStore) -> dict[str, bytes]:
    current = next_iteration(store)
    # Rollout may run ahead of the committed iterations.
    ahead = len(plans_in_flight(store))
    alive = [key for index in range(max(2, ahead)) for key in store.list(layout.alive_all(current + index))]
    # On one machine, training may wait for an evaluation.
    heartbeats, batches = signs_of_life(store)
    signs = dict.fromkeys(batches, b"")
    for key in (layout.LEASE_BEAT, *alive, *heartbeats):
        try:
            signs[key] = store.get(key)
        except ObjectMissing:
            continue
    return signs
