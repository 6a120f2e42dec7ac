"""The drawn faults of an iteration's processes, applied when their time comes.

Kills, notices, freezes and hanging engines strike processes; outages and refusals strike the store; strangers overwrite
heartbeats. The struck process is drawn among living processes when the fault happens.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from simulation.ledger import Ledger
from simulation.simulated_history import LASTING, SLOWEST_CLOCK, TRAINING_S_MAX, History, Strike
from simulation.simulated_lines import Lines
from simulation.simulated_machine import HangingEngine
from simulation.simulated_session import Machine
from simulation.virtual_time import Timeline
from storage.records import layout
from storage.records.canonical import wrap
from storage.records.crew_records import HeartbeatRecord

HOUR_S = 3600.0
# How many of those that live when the iteration is closed are frozen then, and for how long.
ZOMBIES, ZOMBIE_S = 0.3, (30.0, 600.0)
# Another member writes its heartbeat under the number of no slot.
STRANGER = "00999-00000000000000ff"


@dataclass
class Cast:
    """The processes of an iteration.

    Attributes:
        members: by number.
        trainer: the trainer's last life.
        noticed: names of processes that have notice.
    """

    members: dict[int, Machine] = field(default_factory=dict)
    trainer: Machine | None = None
    noticed: set[str] = field(default_factory=set)

    def living(self) -> list[int]:
        """The numbers of the members that live, in order."""
        return [member for member, process in sorted(self.members.items()) if not process.dead]


class Strikes:
    """Applies the strikes of a history. engines: of the members; start_trainer: starts a further life of it.

    note_stop: is told that a process stands still from now on, and how long.
    """

    def __init__(
        self,
        history: History,
        timeline: Timeline,
        ledger: Ledger,
        counts: Counter[str],
        rng: random.Random,
        lines: Lines,
        cast: Cast,
        *,
        engines: Mapping[int, HangingEngine],
        start_trainer: Callable[[], None],
        note_stop: Callable[[Machine, float], None],
    ) -> None:
        self._history = history
        self._timeline = timeline
        self._ledger = ledger
        self._counts = counts
        self._rng = rng
        self._lines = lines
        self._cast = cast
        self._engines = engines
        self._start_trainer = start_trainer
        self._note_stop = note_stop

    def schedule(self) -> None:
        """Schedule all strikes, and the calm after them."""
        for strike in self._history.strikes:
            self._schedule(strike)
        self._timeline.at(self._history.calm_at_s, lambda: self._lines.change(self._history.calm, "calm"))

    def haunt(self) -> None:
        """Freeze members, and the trainer while it publishes, until a later iteration runs; the iteration is closed."""
        rng = random.Random(f"zombies {self._history.seed} {self._history.plan.iteration}")
        for member in self._cast.living():
            if rng.random() < ZOMBIES:
                self._freeze_long(self._cast.members[member], rng)
        trainer = self._cast.trainer
        if trainer is not None and rng.random() < ZOMBIES:
            after_s = rng.uniform(0, 2 * TRAINING_S_MAX + 40 * self._history.weather.latency_s)
            self._timeline.after(after_s, lambda: self._freeze_long(trainer, rng))
            self._timeline.after(after_s + rng.uniform(1, 20), self._start_trainer)

    def _freeze_long(self, process: Machine, rng: random.Random) -> None:
        if process.dead:
            return
        duration_s = rng.uniform(*ZOMBIE_S)
        self._counts["frozen until after the end"] += 1
        self._ledger.tell(process.name, f"is frozen for {duration_s:.1f} s")
        self._note_stop(process, duration_s)
        process.freeze(duration_s)

    def _schedule(self, strike: Strike) -> None:
        self._timeline.at(strike.at_s, lambda: self._strike(strike))

    def _strike(self, strike: Strike) -> None:
        history, living = self._history, self._cast.living()
        self._counts[f"strike: {strike.kind}"] += 1
        self._ledger.note_fault(strike.duration_s if strike.kind in LASTING else 0.0)
        if strike.kind == "outage":
            self._lines.disturb(history.outage, "outage", strike.duration_s)
        elif strike.kind in ("denied", "full"):
            self._lines.disturb(history.refusal(strike.kind), strike.kind, strike.duration_s)
        elif strike.kind == "mass":
            for member in living:
                if self._rng.random() < 0.8:
                    self._preempt(member, strike.duration_s)
        elif strike.kind == "heartbeat":
            self._spoil_heartbeat()
        elif strike.kind in ("trainer kill", "trainer freeze"):
            self._strike_trainer(strike)
        elif strike.kind == "clock":
            self._set_clock(living, strike)
        elif living:
            self._strike_member(self._rng.choice(living), strike)

    def _strike_member(self, member: int, strike: Strike) -> None:
        process = self._cast.members[member]
        self._ledger.tell(process.name, f"suffers {strike.kind}, {strike.duration_s:.1f} s")
        if strike.kind == "kill":
            process.kill()
        elif strike.kind == "notice":
            self._preempt(member, strike.duration_s)
        elif strike.kind == "hang":
            if member in self._engines:
                self._engines[member].hang_s = strike.duration_s
        else:
            self._note_stop(process, strike.duration_s)
            process.freeze(strike.duration_s)
            if strike.kind == "suspend":
                process.clock.stop(strike.duration_s)

    def _preempt(self, member: int, grace_s: float) -> None:
        process = self._cast.members[member]
        self._counts["preemptions"] += 1
        self._ledger.tell(process.name, f"will be killed, with notice of {grace_s:.1f} s")
        if grace_s:
            self._cast.noticed.add(process.name)
        self._timeline.after(grace_s + self._rng.uniform(0, 3), process.kill)

    def _strike_trainer(self, strike: Strike) -> None:
        process = self._cast.trainer
        if process is None or process.dead:
            return
        self._ledger.tell(process.name, f"suffers {strike.kind}, {strike.duration_s:.1f} s")
        if strike.kind == "trainer kill":
            process.kill()
        else:  # its successor works by the time it goes on
            self._note_stop(process, strike.duration_s)
            process.freeze(strike.duration_s)
            self._timeline.after(0.7 * strike.duration_s, self._start_trainer)

    def _set_clock(self, living: list[int], strike: Strike) -> None:
        """The wall clock of a member or the trainer is off by an hour or more for a while."""
        trainer = self._cast.trainer
        processes = [*(self._cast.members[member] for member in living), *([trainer] if trainer else [])]
        if not processes:
            return
        process = self._rng.choice(processes)
        offset_s = self._rng.choice((-24, -1, 1, 24)) * HOUR_S
        self._ledger.tell(process.name, f"has its wall clock set by {offset_s:+.0f} s")
        process.clock.jump(offset_s)
        self._timeline.after(strike.duration_s, lambda: process.clock.jump(-offset_s))

    def _spoil_heartbeat(self) -> None:
        """A heartbeat becomes garbage or one of a later version, or a stranger leaves an unchanging heartbeat."""
        store, iteration = self._ledger.store, self._history.plan.iteration
        keys = [*store.list(layout.alive_all(iteration)), layout.alive(iteration, STRANGER)]
        key, garbage = self._rng.choice(keys), self._rng.random() < 0.5
        later = wrap(key, HeartbeatRecord.KIND, b'{"incarnation":"later","zeal":1}')
        store.put(key, self._rng.randbytes(self._rng.randint(1, 200)) if garbage else later)
        # A process that reads it may take its writer for living for as long as it takes to see that it is silent.
        self._ledger.note_fault(self._history.claim_ttl_s / SLOWEST_CLOCK)
        self._ledger.tell("stranger", f"overwrites {key}{' with garbage' if garbage else ''}")
