"""A simulated crew: production members and a trainer run through a history, on virtual time and a faulty store.

Session, claims, journal, rebalancing and the trainer's following are production code; only engine, clock and store are
deterministic replacements. This module plays Flyte: it starts lost members again, with another name and a cold start.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from simulation.ledger import Ledger
from simulation.simulated_absence import Outage, Pods
from simulation.simulated_history import History
from simulation.simulated_lines import Lines, started
from simulation.simulated_member import EXECUTION, Members
from simulation.simulated_session import Machine
from simulation.simulated_strikes import Cast, Strikes
from simulation.simulated_trainer import SimulatedTrainer, keep_lease, observe
from simulation.undisturbed import Whole, undisturbed
from simulation.virtual_time import Timeline
from storage.journal.assembly import JournalReader
from storage.records import layout
from storage.records.crew_records import note_rollout_ended
from storage.records.records import TRAIN_POOL
from storage.stores.faults import Crashed
from storage.stores.store import CorruptObject, StoreDenied, StoreUnavailable
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.session.crew_watch import CrewLost
from tasks.sampling.session.session_outcome import Preempted

TRAINER, OBSERVER, FLYTE = "trainer", "observer", "flyte"
RELAUNCH_AFTER_S = 300.0
TURNS_MAX = 200_000
WAITS_MAX = 3
EXPECTED = (Preempted, StoreUnavailable, EngineDied)
# What a store that refuses requests for a while ends: the operator starts it again.
REFUSED = (StoreDenied, CrewLost)


@dataclass
class Outcome:
    """The course of a history: the true store, the counts of events, and the time of the end.

    Attributes:
        requests_to_bound: the most requests of any member, as a share of the bound (simulation/judge.py).
        promise_to_bound: the longest time that a token was in one process only, as a share of the bound
            (simulation/judge_promises.py).
        wait_to_bound: the longest time without new tokens, as a share of the bound (simulation/judge_absence.py).
    """

    history: History
    ledger: Ledger
    truth: Mapping[int, Whole]
    counts: Counter[str]
    ended_at_s: float
    requests_to_bound: float = 0.0
    promise_to_bound: float = 0.0
    wait_to_bound: float = 0.0

    @property
    def broken(self) -> list[str]:
        """Every broken rule, with its kind ahead of the colon."""
        return self.ledger.broken


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """The first outcome with the counts, the greatest shares of bounds, and the end of all."""
    return replace(
        outcomes[0],
        counts=sum((outcome.counts for outcome in outcomes), Counter()),
        ended_at_s=max(outcome.ledger.zero_s + outcome.ended_at_s for outcome in outcomes),
        requests_to_bound=max(outcome.requests_to_bound for outcome in outcomes),
        promise_to_bound=max(outcome.promise_to_bound for outcome in outcomes),
        wait_to_bound=max(outcome.wait_to_bound for outcome in outcomes),
    )


class Standing(Protocol):
    """The part of a standing crew that an iteration uses: processes by number, none the number of a slot."""

    processes: dict[int, Machine]

    def note_stop(self, process: Machine, duration_s: float, /) -> None: ...


class SimulatedCrew:
    """Members, the trainer and an observer of one iteration of a history, which begins now."""

    def __init__(
        self,
        history: History,
        timeline: Timeline,
        rng: random.Random,
        begin: Callable[[Timeline], Ledger],
        trained: Callable[[], None] | None = None,
        standing: "Standing | None" = None,
    ) -> None:
        """begin: gives the ledger of the iteration.

        trained: is called when a life of the trainer has published; None: the trainer only closes the iteration.
        standing: the members of the crew, if they are not the iteration's own; others may join them.
        """
        self._standing = standing
        self.history = history
        self._rng = rng
        self.truth = undisturbed(history)
        self._timeline = timeline.beginning_now()
        self._ledger = begin(self._timeline)
        self._trained = trained
        self.is_trained = False
        self.lines = Lines(history, self._timeline, self._ledger)
        self.cast = Cast()
        self._starts_pending = 0
        self._trainers = 0
        self._counts: Counter[str] = Counter()
        self._pods = Pods(history.absence, [place.slot for place in history.plan.slots if place.pool != TRAIN_POOL])
        self._is_map_noted = self._are_latecomers_due = False
        self.lives = Members(history, self._ledger, self._counts, lambda: self._timeline.now_s, self.lines.connect)

    def begin(self) -> None:
        """Schedule everything that was drawn; the trainer comes by itself."""
        self._timeline.allow(self._limit_s, TURNS_MAX)
        if self._standing is not None:
            self.cast.members.update(self._standing.processes)
        for member, arrival_s in enumerate(self.history.arrivals_s):
            if self._pods.comes(member) and (self._standing is None or not self.history.is_crew(member)):
                self._schedule_member(member, arrival_s)
        for outage in self.history.absence.outages if self.history.absence else ():
            self._timeline.at(outage.at_s, partial(self._black_out, outage))
        strikes = Strikes(
            self.history,
            self._timeline,
            self._ledger,
            self._counts,
            self._rng,
            self.lines,
            self.cast,
            engines=self.lives.engines,
            start_trainer=self._start_trainer,
            note_stop=self.lines.note_stop if self._standing is None else self._standing.note_stop,
        )
        strikes.schedule()
        if self._trained is not None:
            self._ledger.closes = strikes.haunt
        self._start(OBSERVER, self._observe, self._ended)

    def train(self) -> None:
        """Start the trainer."""
        self._timeline.allow(self._limit_s, TURNS_MAX)
        self._start_trainer()

    def outcome(self) -> Outcome:
        """The course of the iteration, when no event is left, zombies included."""
        self._counts.update(self.lines.faults())
        return Outcome(self.history, self._ledger, self.truth, self._counts, self._timeline.now_s)

    @property
    def iteration(self) -> int:
        """Its number."""
        return self.history.plan.iteration

    @property
    def refuses(self) -> bool:
        """Whether the store has refused requests for a while."""
        return self._ledger.refuses

    @property
    def _limit_s(self) -> float:
        """The time by which even the slowest machine alone would have decoded everything after the last fault."""
        history = self.history
        tokens = sum(len(whole.token_ids) for whole in self.truth.values())
        standing_s = sum(strike.duration_s for strike in history.strikes) + 10 * history.weather.pause_s[1]
        waiting_s = 2 * RELAUNCH_AFTER_S + 20 * history.claim_ttl_s + self._talking_s
        if history.absence is not None:
            # Full batches, and at the end the longest response alone.
            steps = 2 * tokens / history.in_flight + max(len(whole.token_ids) for whole in self.truth.values())
            decoding_s = steps * history.slowest_step_s
            return history.last_fault_s + WAITS_MAX * history.wait_s_max + decoding_s + self._talking_s
        return history.calm_at_s + standing_s + waiting_s + 2 * tokens * history.slowest_step_s

    @property
    def _talking_s(self) -> float:
        """The time of all calls if each were made alone; no conversation has more calls than tokens of observations."""
        calls = sum(len(whole.token_ids) - len(whole.logprobs) for whole in self.truth.values())
        return self.history.call_s_max * calls

    # Members and what Flyte does with them.

    def _schedule_member(self, member: int, delay_s: float) -> None:
        self._starts_pending += 1
        self._timeline.after(delay_s, lambda: self._start_member(member))

    def _start_member(self, member: int) -> None:
        self._starts_pending -= 1
        delay_s = 0.0 if self._is_trainers(member) else self._pods.delay_s(self._timeline.now_s)
        # In histories with absences, members also start after the end: they must then do nothing.
        if math.isinf(delay_s) or (self._ledger.is_closed and self.history.absence is None):
            return
        if delay_s:
            self._schedule_member(member, delay_s + self._rng.uniform(*self.history.cold_start_s))
            return
        lasts_s = self._pods.start(member)
        self._counts["joins" if self._joins(member) else "starts"] += 1
        name = f"{member:05d}-{self._rng.getrandbits(64):016x}"
        process = self.cast.members[member] = self._start(
            name,
            lambda process: self.lives.live(process, member, lambda: process.name in self.cast.noticed),
            lambda process, error: self._lost(process, member, error),
        )
        if lasts_s is not None:
            self._timeline.after(lasts_s, process.kill)

    def _joins(self, member: int) -> bool:
        return member >= len(self.history.plan.slots)

    def _is_trainers(self, member: int) -> bool:
        return self.history.pool(member) == TRAIN_POOL

    def _lost(self, process: Machine, member: int, error: BaseException | None) -> None:
        self._ended(process, error)
        if error is not None and self._comes_again(member, error):
            self._schedule_member(member, self._starts_after_s())
            return
        self._pods.ended(member)
        self._note_end_of_map()
        self._timeline.after(RELAUNCH_AFTER_S, self._relaunch)

    def _starts_after_s(self) -> float:
        """How long a process takes to start again; after a refusal by the store, until the refusal is over."""
        refused_s = max(0.0, self.lines.refused_until_s - self._timeline.now_s)
        return refused_s + self._rng.uniform(*self.history.cold_start_s)

    def _comes_again(self, member: int, error: BaseException) -> bool:
        """Whether a member is started again; the trainer's is not after its engine died or training has begun."""
        if self._is_trainers(member):
            return not isinstance(error, EngineDied) and layout.batch(self.iteration, 0) not in self._ledger.created
        if self._joins(member):
            return self._rng.random() < 0.3
        return self._pods.starts_again(member)

    def _black_out(self, outage: Outage) -> None:
        """Kill all members but the trainer's at once; none starts for a while, or ever again."""
        self._counts["crew outages for ever" if math.isinf(outage.duration_s) else "crew outages"] += 1
        self._ledger.note_fault()
        self._ledger.tell(FLYTE, f"has no machines, {outage.duration_s:.1f} s")
        self._pods.none_until(self._timeline.now_s + outage.duration_s)
        for member, process in sorted(self.cast.members.items()):
            if not self._is_trainers(member):
                process.kill()
        self._note_end_of_map()

    def _note_end_of_map(self) -> None:
        """Write what the task behind a rollout map writes, some time after the map's last slot has ended."""
        if self.history.absence is None or self._is_map_noted or not self._pods.all_ended:
            return
        self._is_map_noted = True
        self._counts["rollout maps noted as ended"] += 1
        slots = [place.slot for place in self.history.plan.slots if not self._is_trainers(place.slot)]
        self._timeline.after(
            self._rng.uniform(1, 30),
            lambda: note_rollout_ended(self._ledger.view(FLYTE), self.iteration, EXECUTION, "rollout", slots),
        )

    def _relaunch(self) -> None:
        """Note a broken rule when no member is left although the iteration is not finished, and start all slots again.

        If the trainer's machine generates, no other member is needed; a later check verifies that it does.
        """
        if self.history.absence is not None or self._standing is not None:
            return
        if self._ledger.is_closed or self._starts_pending or self.cast.living():
            return
        if self._is_finished():
            return
        self._counts["relaunches"] += 1
        self._ledger.breaks("livelock: every member has left, and the iteration is not finished")
        self._ledger.tell("operator", "starts all slots again")
        for slot in range(len(self.history.plan.slots)):
            self._schedule_member(slot, 0.0)

    def _is_finished(self) -> bool:
        reader = JournalReader(self._ledger.store, self.history.plan, 1)
        try:
            reader.refresh()
            return all(reader.assemble(response).finish.ends_response for response in self.truth)
        except CorruptObject:  # the checks at the end report it
            return True

    # The trainer, the observer, and every process.

    @property
    def _is_done(self) -> bool:
        """Whether no further life of the trainer is needed."""
        return self._ledger.is_closed if self._trained is None else self.is_trained

    def _start_trainer(self) -> None:
        if not self._is_done:
            self._trainers += 1
            of = f"{TRAINER}{self.iteration or ''}"
            self.cast.trainer = self._start(f"{of}-{self._trainers}", self._train, self._trainer_ended)

    def _train(self, process: Machine) -> None:
        store = self.lines.connect(process, process.name)
        rng = random.Random(f"helping {self.history.seed} {process.name}")
        trainer = SimulatedTrainer(
            self.history,
            store,
            process,
            self._ledger,
            self.truth,
            generate=lambda: self.lives.help_out(process, store, rng),
        )
        if self._trained is None:
            trainer.train()
            return
        process.spawn(lambda: keep_lease(store, process))
        trainer.advance()

    def _trainer_ended(self, process: Machine, error: BaseException | None) -> None:
        self._ended(process, error)
        if self._ledger.is_closed and not self._are_latecomers_due:
            self._are_latecomers_due = True
            for member, late_s in self._pods.latecomers().items():
                self._schedule_member(member, late_s)
        if error is not None:
            self._timeline.after(self._starts_after_s(), self._start_trainer)
        elif self._trained is not None and not self.is_trained:
            self.is_trained = True
            self._trained()

    def _observe(self, process: Machine) -> None:
        store = self.lines.connect_calmly(process, f"line {self.history.seed}")
        observe(self.history, store, process, self._ledger, self.truth)

    def _start(
        self,
        name: str,
        main: Callable[[Machine], object],
        on_end: Callable[[Machine, BaseException | None], object],
    ) -> Machine:
        return started(self._timeline, self._ledger, self.history.seed, name, main, on_end)

    def _ended(self, process: Machine, error: BaseException | None) -> None:
        how = "done" if error is None else type(error).__name__
        self._ledger.ends[process.name] = self._timeline.now_s, how
        if error is not None:
            self._ledger.note_fault()
        self._counts[f"ended: {how}"] += 1
        for thread in process.threads:
            self._timeline.after(0.0, thread.kill)
        self._ledger.tell(process.name, f"ends: {how}{f' {error}' if error is not None else ''}")
        crashed_at = self.lines.crashed_at(process)
        if isinstance(error, Crashed) and crashed_at is not None:
            moment, call = crashed_at
            verb, key = call.split(" ", 1)
            kind = key.removeprefix(layout.iteration(self.iteration)).split("/", 1)[0]
            self._counts[f"crash: {moment} {verb} {kind}"] += 1
        expected = (*EXPECTED, *REFUSED) if self._ledger.refuses else EXPECTED
        if isinstance(error, Exception) and not isinstance(error, expected):
            self._ledger.breaks(f"error: {process.name} ended with {error!r}")
