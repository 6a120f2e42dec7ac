"""Watching a run: reads what is new at each look, and turns it into the views of `crew_view`. Never writes.

Each look lists claims and heartbeats, and gets the next shards of the incarnations that hold unfinished work and the
heartbeats of those worth showing; what was read is kept. Ages use this clock only: clocks are never compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from storage.clock import Clock
from storage.journal.assembly import JournalReader
from storage.journal.claims import Owner
from storage.journal.liveness import Liveness
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.failures import last_failures
from storage.records.records import BatchRecord, PlanRecord
from storage.records.run import exists, holds_run, next_iteration, read_plan, read_report
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, StoreUnavailable
from tasks.configuration.deleted_fields import without_deleted
from tasks.configuration.iteration_config import resolved_in_force
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.run_config import parse_held
from tasks.reporting.crew_view import UNREAD, CrewView, Phase, Progress, RunView, Totals, WatchedHeartbeat
from tasks.reporting.last_failures import holder_of, silent_end


class Watcher:
    """Looks at the current iteration of a run, and moves to the next one when it is committed."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._iteration: int | None = None
        self._open: OpenIteration | None = None
        self._phase: tuple[int, Phase] | None = None
        self._phase_since_s = 0.0
        self._holder: str | None = None

    def looks(self, interval_s: float) -> Iterator[RunView]:
        """Looks without end. If the store does not answer, `notice` says so, and the next look asks again."""
        view = self.look()
        while True:
            yield view
            self._clock.sleep(interval_s)
            try:
                view = self.look()
            except StoreUnavailable as error:
                view = replace(view, notice=str(error))

    def look(self) -> RunView:
        """The run as it is now. Raises StorageError for what cannot be read."""
        view = self._look()
        if view.phase not in ("no run", "ended"):
            committed = view.iteration + (view.phase == "committed")
            failed = tuple(last_failures(self._store, committed))
            view = replace(view, failures=failed, silent_end=self._silent_end(view))
        now_s = self._clock.monotonic()
        if self._phase != (view.iteration, view.phase):
            self._phase, self._phase_since_s = (view.iteration, view.phase), now_s
        return replace(view, phase_seen_s=now_s - self._phase_since_s)

    def _silent_end(self, view: RunView) -> str:
        """What `silent_end` says; a request is made only at another phase, or where that process has ended."""
        if self._phase != (view.iteration, view.phase) or silent_end(self._holder):
            self._holder = holder_of(self._store)
        return silent_end(self._holder)

    def _look(self) -> RunView:
        while True:
            iteration = self._find_iteration()
            if iteration is None:
                return self._view(0, "no run")
            if self._open is None:
                try:
                    self._open = OpenIteration(self._store, read_plan(self._store, iteration), self._clock)
                except ObjectMissing:
                    return self._between(iteration)
            if self._open.is_ended_evaluation():
                return self._open.look_at_end()
            try:
                return self._open.look()
            except (ObjectMissing, CorruptObject):
                # A committed iteration's claims and shards may be deleted while they are read.
                if not exists(self._store, layout.report(iteration)) and not self._open.is_ended_evaluation():
                    raise

    def _find_iteration(self) -> int | None:
        """Move to the first iteration without a report; returns None if there is no run."""
        if self._iteration is None:
            if not holds_run(self._store):
                return None
            self._iteration = next_iteration(self._store)
        while exists(self._store, layout.report(self._iteration)):
            self._iteration, self._open = self._iteration + 1, None
        return self._iteration

    def _between(self, iteration: int) -> RunView:
        """The view while the next iteration has no plan."""
        if iteration == 0:
            return self._view(0, "planning")
        lengths = read_report(self._store, iteration - 1).lengths
        totals = Totals(responses_planned=len(lengths), responses_done=len(lengths), tokens=sum(lengths))
        return replace(self._view(iteration - 1, "committed"), totals=totals)

    def _view(self, iteration: int, phase: Phase) -> RunView:
        return RunView(run_url=self._store.url, iteration=iteration, phase=phase)


class OpenIteration:
    """A planned and uncommitted iteration, as far as it was read."""

    def __init__(self, store: ObjectStore, plan: PlanRecord, clock: Clock) -> None:
        self._store = store
        self._plan = plan
        self._reader = JournalReader(store, plan)
        config = resolved_in_force(store, plan)
        self._silent_after_s = config.get("rollout", {}).get("claim_ttl_s", RolloutConfig().claim_ttl_s)
        self._prices_usd_per_h = known_prices(config)
        self._ended: dict[int, tuple[Owner, Progress]] = {}
        self._recorded: dict[int, Progress] = {}
        self._rewards: list[float] = []
        self._responses_trained = 0
        self._micro_batches = 0
        self._liveness = Liveness(store, plan.iteration, clock)
        self._heartbeats: dict[str, WatchedHeartbeat] = {}

    def look(self) -> RunView:
        """Read what is new, and return the view."""
        crew, gone = self._read_crew(), self._gone()
        self._read_heartbeats(crew)
        if self._gone() != gone:
            # What a member wrote before it said good-bye belongs to the same look.
            crew = self._read_crew()
        members = crew.members(self._heartbeats, self._silent_after_s)
        recorded = len(self._recorded) // self._plan.num_generations
        waits_for, behind = ((), 0) if self._is_filled else crew.waits_for()
        return RunView(
            run_url=self._store.url,
            iteration=self._plan.iteration,
            phase=self._phase(all_done=not waits_for),
            totals=crew.totals(
                members, groups_recorded=recorded, micro_batches=self._micro_batches, reward=self._reward()
            ),
            waits_for=waits_for,
            groups_behind=behind,
            members=members,
        )

    def _read_crew(self) -> CrewView:
        """Read the batches, claims and shards that are new."""
        self._read_batches()
        self._reader.book.refresh()
        unfinished = [r for r in range(self._plan.num_responses) if self._known_end(r) is None]
        self._reader.shards.advance_all(self._reader.incarnations_to_read(unfinished))
        progress = {response: self._progress(response) for response in range(self._plan.num_responses)}
        return CrewView(self._plan, self._reader.book, progress, self._prices_usd_per_h)

    def _gone(self) -> set[str]:
        """The incarnations that have said good-bye, as far as was read."""
        return {name for name, beat in self._heartbeats.items() if beat.record and beat.record.state == "gone"}

    def _reward(self) -> float | None:
        return sum(self._rewards) / len(self._rewards) if self._rewards else None

    def is_ended_evaluation(self) -> bool:
        """Whether it is an evaluation with every response recorded; its claims and shards may then be deleted."""
        return self._plan.weights_url is not None and exists(self._store, layout.closed(self._plan.iteration))

    def look_at_end(self) -> RunView:
        """The view of an ended evaluation, from its records."""
        self._read_batches()
        tokens = sum(progress.tokens for progress in self._recorded.values())
        totals = Totals(responses_planned=self._plan.num_responses, responses_done=len(self._recorded), tokens=tokens)
        return RunView(run_url=self._store.url, iteration=self._plan.iteration, phase="ended", totals=totals)

    @property
    def _is_filled(self) -> bool:
        """Whether as many groups are trained as are wanted, so that the trainer waits for no further one."""
        wanted = self._plan.groups_wanted
        return wanted is not None and self._responses_trained >= wanted * self._plan.num_generations

    def _phase(self, *, all_done: bool) -> Phase:
        if not all_done:
            return "rollout"
        return "publishing" if exists(self._store, layout.training(self._plan.iteration)) else "training"

    def _read_batches(self) -> None:
        while True:
            key = layout.batch(self._plan.iteration, self._micro_batches)
            try:
                batch = records.read(self._store, BatchRecord, key)
            except ObjectMissing:
                return
            self._recorded.update({each.response: Progress(each.policy_length, done=True) for each in batch.graded})
            if self._plan.is_graded:
                self._rewards += [graded.reward for graded in batch.graded if graded.reward is not None]
            self._responses_trained += len(batch.responses)
            self._micro_batches += 1

    def _known_end(self, response: int) -> Progress | None:
        """A response's end, if known without reading: recorded by the trainer, or ended under its present owner."""
        if response in self._recorded:
            return self._recorded[response]
        owner, state = self._ended.get(response, (None, None))
        return state if owner == self._reader.book.owner(response) else None

    def _progress(self, response: int) -> Progress:
        known, owner = self._known_end(response), self._reader.book.owner(response)
        if known is not None:
            return known
        if owner is None:
            return Progress()
        assembled = self._reader.assemble(response)
        is_owners = bool(assembled.lineage) and assembled.lineage[-1].epoch == owner.epoch
        released = is_owners and assembled.finish is Finish.RELEASED
        state = Progress(assembled.policy_length, done=assembled.finish.ends_response, released=released)
        if state.done:
            self._ended[response] = owner, state
        return state

    def _read_heartbeats(self, crew: CrewView) -> None:
        """Read heartbeats of members worth showing, and of those without claims, unless they left or fell silent."""
        prefix = layout.alive_all(self._plan.iteration)
        listed = [key.removeprefix(prefix).removesuffix(".json") for key in self._store.list(prefix)]
        idle = [name for name in listed if name not in self._reader.book.incarnations]
        names = crew.incarnations_to_show(self._heartbeats, self._silent_after_s)
        names += [name for name in idle if self._heartbeats.get(name, UNREAD).is_alive(self._silent_after_s)]
        for name, sign in self._liveness.look(list(dict.fromkeys(names))).items():
            if sign.found:
                self._heartbeats[name] = WatchedHeartbeat(sign.record, sign.silent_s, sign.changed)


def known_prices(config: Mapping[str, Any]) -> dict[str, float]:
    """Return dollars per hour of a slot by pool; empty if the machine's price table lacks a pool."""
    try:
        pools = parse_held(without_deleted(config, to_read=True)).pools.rollout_pools
        return {name: pool.price_usd_per_h for name, pool in pools.items()}
    except (ValueError, LookupError):
        return {}
