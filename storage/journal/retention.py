"""Retention: deletes what no resumable or replayable iteration needs, in an order that may stop anywhere.

Names alone decide, with two exceptions: plans of uncommitted iterations state the weight version of their rollout, and
a journal is deleted only after `compact` has read back its replacement. The next sweep finishes an interrupted sweep,
and also deletes late writes of a frozen member.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage.journal.compaction import compact, recorded, unnamed_parts
from storage.journal.retention_config import RetentionConfig
from storage.records import layout, records
from storage.records.evaluations import versions_under_evaluation
from storage.records.records import ClosedRecord
from storage.records.run import next_iteration, plans_in_flight, read_plan
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing, ObjectStore, StoreDenied
from storage.waiting import Progress, no_progress
from storage.weights.stored_versions import Versions, list_versions, newest_of
from storage.weights.versions import bases

log = logging.getLogger(__name__)
THREADS = 8
# A plan and a conclusion read the newest table; the others serve if that one cannot be read.
LENGTH_TABLES_KEPT = 4
# These errors concern one iteration or version, and do not keep a sweep from the others: without the right to delete,
# it can still compact.
PROBLEMS = (CorruptObject, ObjectMissing, ConflictingRecord, StoreDenied)


@dataclass(frozen=True, kw_only=True)
class Swept:
    """The result of a sweep; with `dry_run`, of a sweep that would be made.

    Attributes:
        compacted: iterations whose responses were stored by parts.
        deleted: keys.
        problems: objects left alone, and why.
    """

    compacted: tuple[int, ...]
    deleted: tuple[str, ...]
    problems: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        """How many objects of each kind were deleted: journal, alive, claims, weights, checkpoints, lengths, responses.

        `responses` are parts that no record names; `scoring` is all that scorers wrote.
        """
        parts = (key.split("/") for key in self.deleted)
        return Counter(names[2] if f"{names[0]}/" == layout.ITERATIONS else names[0] for names in parts)


def sweep(
    store: ObjectStore,
    config: RetentionConfig,
    *,
    newest: int | None = None,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> Swept:
    """Compact and delete as `config` says; may be repeated, or run beside another sweep, at any time.

    newest: look at this many committed iterations only; None: at all of them. progress: called with the
    iteration that is looked at now, and how many of how many were.
    Objects that may not be deleted, or are damaged, are among the problems. Raises StoreUnavailable if the store does
    not answer, and StoreDenied if it shows nothing; the next sweep continues from there.
    """
    current = next_iteration(store)
    weights, checkpoints = (list_versions(store, prefix) for prefix in (layout.WEIGHTS, layout.CHECKPOINTS))
    deletion = _Deletion(store, dry_run=dry_run)
    compacted: list[int] = []
    problems: list[str] = []
    first = 0 if newest is None else max(0, current - newest)
    # Once an iteration's weights are published it is trained again only by a replay, which reads its parts as well.
    trained = min(current, weights.newest)
    for iteration in range(first, trained) if config.compact else ():
        progress(f"looking at iteration {iteration}", iteration - first, trained - first)
        try:
            _sweep_iteration(store, iteration, deletion, compacted)
        except PROBLEMS as error:
            problems.append(f"iteration {iteration}: {error}")
    progress("looking at weights and checkpoints", 0, 0)
    kept = {0, current, *newest_of(weights, config.keep_weights)}
    try:
        # An iteration that runs ahead samples from an older version than the iteration that is trained next.
        kept |= {plan.weight_version for plan in plans_in_flight(store)}
        kept |= versions_under_evaluation(store)
        kept |= {base for version in kept & weights.complete for base in bases(store, version)}
        _sweep_versions(weights, kept, current, deletion)
    except PROBLEMS as error:
        problems.append(f"weights: {error}")
    try:
        restored = checkpoints.newest_up_to(current)
        # A newer one without a manifest may still get it, from a trainer that was frozen after it had published the
        # weights; it would then count as the newest.
        _sweep_versions(checkpoints, newest_of(checkpoints, config.keep_checkpoints), restored, deletion)
    except PROBLEMS as error:
        problems.append(f"checkpoints: {error}")
    try:
        tables = [key for key in store.list(layout.LENGTHS) if layout.lengths_iteration(key) in range(current)]
        deletion.run(tables[:-LENGTH_TABLES_KEPT])
    except PROBLEMS as error:
        problems.append(f"lengths: {error}")
    for problem in problems:
        log.warning("left as it is: %s", problem)
    return Swept(compacted=tuple(compacted), deleted=tuple(deletion.keys), problems=tuple(problems))


def settle(store: ObjectStore, iteration: int) -> None:
    """Compact an iteration with every response recorded, then delete its journal; may be repeated at any time.

    Raises what `compact` raises, and StoreDenied.
    """
    _sweep_iteration(store, iteration, _Deletion(store, dry_run=False), [])


class _Deletion:
    """Deletes groups of keys in turn, each group in parallel, and records the keys; `dry_run` only records."""

    def __init__(self, store: ObjectStore, *, dry_run: bool) -> None:
        self._store = store
        self.dry_run = dry_run
        self.keys: list[str] = []

    def run(self, keys: Sequence[str]) -> None:
        if keys and not self.dry_run:
            with ThreadPoolExecutor(min(THREADS, len(keys))) as pool:
                list(pool.map(self._store.delete, keys))
        self.keys += keys

    def forestall(self, keys: Sequence[str]) -> None:
        """Delete what was not there when the keys were listed; such keys are not recorded."""
        for key in () if self.dry_run else keys:
            self._store.delete(key)


def _sweep_iteration(store: ObjectStore, iteration: int, deletion: _Deletion, compacted: list[int]) -> None:
    """Compact a committed iteration, note a first compaction in `compacted`, then delete the journal.

    Parts without a place in the iteration's record are deleted, too.

    Claims are deleted last: while claims exist, a reader that misses a shard knows that the shard was deleted, and does
    not take it for unwritten.
    """
    keys = store.list(layout.iteration(iteration))
    hints = (layout.asks(iteration), layout.alive_all(iteration))
    # The scores that training has read lie with the batches.
    of_scorers = [layout.scoring(iteration) + of(iteration) for of in (layout.journal, layout.alive_all, layout.claims)]
    of_members = (layout.journal(iteration), layout.environment_states(iteration), *hints, layout.claims(iteration))
    prefixes = (*of_scorers, *of_members)
    phases = [[key for key in keys if key.startswith(prefix)] for prefix in prefixes]
    is_new, has_journal = layout.responses(iteration) not in keys, any(phases)
    if has_journal and deletion.dry_run:
        recorded(store, read_plan(store, iteration))
    elif has_journal:
        compact(store, iteration)
        # Without claims, an iteration that is not closed would look as if no member had come yet.
        closed = ClosedRecord(iteration=iteration, reason="the iteration is committed", nonce="committed")
        records.commit(store, layout.closed(iteration), closed)
    if is_new and has_journal:
        compacted.append(iteration)
    if not is_new or (has_journal and not deletion.dry_run):
        deletion.run(unnamed_parts(store, iteration, keys))
    for phase in phases:
        deletion.run(phase)


def _sweep_versions(versions: Versions, kept: Collection[int], end: int, deletion: _Deletion) -> None:
    """Delete versions before `end` that are not `kept`, and the rest of half-deleted ones.

    The newest version goes first, because an older one may be its base. Of each version the manifest goes first:
    without it the version does not exist. Versions from `end` on may be about to be published.
    """
    for version in sorted(versions.keys, reverse=True):
        if version < end and version not in kept:
            keys = versions.keys[version]
            if version not in versions.complete:
                # A frozen writer may have published the version after the listing.
                folder = "/".join(keys[0].split("/")[:2]) + "/"
                deletion.forestall([layout.manifest(folder), layout.delta_manifest(folder)])
            for name in ("/manifest.json", "/delta.json", ""):
                deletion.run([key for key in keys if key.endswith(name)])
                keys = [key for key in keys if not key.endswith(name)]
