"""CrewWatch: whether any member other than the trainer's machines generates, and whether a member can still come.

The watch reads heartbeats and the notes of ended rollout maps, never the journal. One thread at a time uses a watch.
"""

import logging
import uuid

from storage.clock import Clock
from storage.errors import GleanerError
from storage.journal.journal import PARALLEL_READS
from storage.journal.liveness import Liveness, MemberSign
from storage.records import layout
from storage.records.crew_records import ended_slots
from storage.records.failures import FailureRecord, slot_failures
from storage.records.records import TRAIN_POOL, PlanRecord
from storage.stores.store import ObjectStore, StoreDenied, StoreUnavailable, StoreUnfit
from storage.waiting import SILENT_S, moment
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.rollout import RolloutConfig
from tasks.crew_model.rebalance import LOOKS_MAX
from tasks.planning.seeding import generates_again

log = logging.getLogger(__name__)
LOG_INTERVAL_S = 60.0
SLOTS_SHOWN = 8
# What no further attempt is made after: the store refuses the member (tasks/rollout.py).
LASTING = tuple(f"{kind.__name__}: " for kind in (StoreDenied, StoreUnfit))
NEVER_WROTE = (
    "wrote nothing into the run; the state of its pods in the Flyte console says why (the image could not be pulled, "
    "memory ran out before Python began, the store could not be reached)"
)


LOST_EARLIER = "was killed in an earlier iteration, or "


class LeftAlone(Exception):  # noqa: N818 - not an error: the trainer is to generate, as no other member does
    """No member of the crew lives, so the trainer's machines are to generate."""


class CrewLost(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """No process can generate the missing responses; the message says what became of each slot."""


class CrewWatch:
    """Watches the members of one iteration, apart from members on the trainer's machines."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        rollout: RolloutConfig,
        planning: PlanningConfig,
        clock: Clock,
        *,
        execution: str,
        crew_ended: bool = False,
        at_once: bool = True,
        seeding_after_s: float | None = None,
        parallel_reads: int = PARALLEL_READS,
    ) -> None:
        """Begin the watch.

        execution: the Flyte execution whose rollout maps are watched. crew_ended: whether the caller knows that the
        maps have ended. at_once: whether LeftAlone is raised without the wait of seeding_after_s when the maps have
        ended and no member has joined. seeding_after_s: None is the rollout's.
        """
        self._store = store
        self._plan = plan
        self._rollout = rollout
        self._planning = planning
        self._clock = clock
        self._execution = execution
        self._crew_ended = crew_ended
        self._at_once = at_once
        self._seeding_after_s = rollout.seeding_after_s if seeding_after_s is None else seeding_after_s
        self._slots = {place.slot for place in plan.crew_slots}
        self._liveness = Liveness(store, plan.iteration, clock, parallel_reads)
        self._signs: dict[str, MemberSign] = {}
        # The members that were there when the watch began; None: not listed yet.
        self._first_there: frozenset[str] | None = None
        self._seemed_over = False
        # The ends and failures of slots that a line has told of.
        self._told: set[tuple[int, float | None]] = set()
        now_s = clock.monotonic()
        self._alive_at_s = self._next_look_s = now_s
        self._next_log_s = now_s + LOG_INTERVAL_S

    def lives(self) -> bool:
        """Read the heartbeats: whether a member has beaten since the watch began, and has neither left nor gone silent.

        A heartbeat from before the watch counts only after a change, so that no member counts that died long ago.
        """
        return bool(self._living(self._ended()))

    def works(self) -> bool:
        """Whether a member lives (see `lives`) and has loaded the weights, and thus can take over at once.

        Without the second condition, a member that dies again and again while loading would make the trainer stop
        generating and start again for ever.
        """
        living = self._living(self._ended())
        return any(sign.record is not None and sign.record.state == "working" for sign in living)

    def check(self, progressed: bool) -> None:
        """Raise LeftAlone when the trainer's machines are to generate, and CrewLost when no process can.

        progressed: whether the journal has grown since the last call, which shows without a look that a member lives.
        """
        now_s = self._clock.monotonic()
        if progressed:
            self._alive_at_s = now_s
        if progressed or now_s < self._next_look_s or not self._slots:
            return
        self._next_look_s = now_s + self._rollout.heartbeat_interval_s
        is_first, ended = self._first_there is None, self._ended()
        if self._living(ended) or is_first:
            # The first look cannot prove that a member lives, so the time counts from it.
            self._alive_at_s = now_s
        alone_s = now_s - self._alive_at_s
        failures = self._failures() if alone_s else {}
        over = ended | {slot for slot, failure in failures.items() if failure.error.startswith(LASTING)}
        seems_over = self._slots <= over and not self._present(ended)
        # The last members may have written tokens that the caller has not read yet; by the next look it has.
        crew_ended, self._seemed_over = seems_over and self._seemed_over, seems_over
        if generates_again(alone_s, self._seeding_after_s, self._planning, crew_ended=crew_ended and self._at_once):
            raise LeftAlone(f"iteration {self._plan.iteration}: no member has lived for {alone_s:.0f} s")
        if crew_ended and self._planning.seeding == "off":
            raise CrewLost(self._describe(over))
        has_news = alone_s >= SILENT_S and self._has_news(over, failures)
        if alone_s and (has_news or now_s >= self._next_log_s):
            self._next_log_s = now_s + LOG_INTERVAL_S
            self._check_writable()
            self._log_waiting(alone_s, over, failures)

    def _has_news(self, ended: set[int], failures: dict[int, FailureRecord]) -> bool:
        """Whether slots have ended, or attempts at slots have failed, since the last call."""
        known: set[tuple[int, float | None]] = {(slot, failure.at_s) for slot, failure in failures.items()}
        known |= {(slot, None) for slot in self._slots & ended}
        news, self._told = not known <= self._told, self._told | known
        return news

    def _living(self, ended: set[int]) -> list[MemberSign]:
        """Read the heartbeats, and return the signs of members that are proven to live."""
        self._look()
        return [sign for name, sign in self._present(ended).items() if self._is_proven(name, sign)]

    def _ended(self) -> set[int]:
        """The slots that Flyte does not start again."""
        if self._crew_ended:
            return self._slots
        return ended_slots(self._store, self._plan.iteration, self._execution)

    def _look(self) -> None:
        """Read up to LOOKS_MAX heartbeats of members that may live, the least silent first."""
        prefix = layout.alive_all(self._plan.iteration)
        names = [key.removeprefix(prefix).removesuffix(".json") for key in self._store.list(prefix)]
        if self._first_there is None:
            self._first_there = frozenset(names)
        open_ = [name for name in names if name not in self._signs or _may_count(self._signs[name])]
        open_.sort(key=lambda name: self._signs[name].silent_s if name in self._signs else 0.0)
        found = self._liveness.look(open_[:LOOKS_MAX])
        self._signs.update({name: sign for name, sign in found.items() if sign.found})

    def _present(self, ended: set[int]) -> dict[str, MemberSign]:
        """The members that may live, as far as was read: not gone, not silent, and not of a slot that has ended.

        An unreadable heartbeat hides the member's slot, so its member counts as having a slot that goes on.
        """
        ttl_s = self._rollout.claim_ttl_s
        return {
            name: sign
            for name, sign in self._signs.items()
            if _may_count(sign) and sign.silent_s < ttl_s and (sign.record is None or sign.record.slot not in ended)
        }

    def _is_proven(self, name: str, sign: MemberSign) -> bool:
        return sign.changed or name not in (self._first_there or ())

    def _check_writable(self) -> None:
        """Raise CrewLost if the store refuses writes: a crew that ends because of the refusal can leave no note."""
        key = f"{layout.PROBE}{uuid.uuid4().hex}"
        try:
            self._store.put(key, b"a crew is waited for")
            self._store.delete(key)
        except StoreUnavailable:
            return
        except StoreDenied as error:
            raise CrewLost(
                f"iteration {self._plan.iteration}: no member lives, and none can journal, because the store refuses "
                f"to be written: {error}"
            ) from error

    def _log_waiting(self, alone_s: float, ended: set[int], failures: dict[int, FailureRecord]) -> None:
        waiting = sorted(self._slots - ended)
        slots = f"slots {', '.join(map(str, waiting))}" if waiting else "members that joined"
        if self._planning.seeding == "off":
            until = "; planning.seeding is 'off', so the trainer's machines do not generate"
        else:
            until = f"; the trainer's machines generate after {self._seeding_after_s:g} s"
        log.warning(
            "iteration %d: no member has lived for %.0f s; waiting for %s%s%s",
            self._plan.iteration,
            alone_s,
            slots,
            until,
            "".join(f"\n  {line}" for line in self._reasons(ended, failures)),
        )

    def _reasons(self, ended: set[int], failures: dict[int, FailureRecord]) -> list[str]:
        """Why slots do not work, as far as is known, in a line each; a last line counts those left out."""
        lines = [
            f"an attempt of slot {slot} failed: {each.error} (on {each.host}, {moment(each.at_s)} by its clock)"
            for slot, each in sorted(failures.items())
        ]
        lines += [
            f"slot {slot} has ended: {self._fate(slot)}" for slot in sorted(self._slots & ended - failures.keys())
        ]
        left = len(lines) - SLOTS_SHOWN
        return [*lines[:SLOTS_SHOWN], *([f"and {left} more slots"] if left > 0 else [])]

    def _describe(self, ended: set[int]) -> str:
        told = self._errors_of_execution()
        lines = [f"slot {slot}: {told.get(slot) or self._fate(slot)}" for slot in sorted(self._slots & ended)]
        return (
            f"iteration {self._plan.iteration}: no process can generate the missing responses. Every slot of the crew "
            "has ended, no other member lives, and the trainer's machines are not to generate (planning.seeding):\n  "
            + "\n  ".join(lines)
        )

    def _failures(self) -> dict[int, FailureRecord]:
        """The last reported failure by slot, for slots with at least one."""
        return slot_failures(self._store, self._plan.iteration, self._execution)

    def _errors_of_execution(self) -> dict[int, str]:
        """The errors of `_failures`; a standing member may have failed in an earlier iteration of its execution."""
        told = {slot: found.error for slot, found in self._failures().items()}
        earlier = self._plan.iteration
        while self._rollout.crew == "standing" and earlier and not self._slots <= told.keys():
            earlier -= 1
            before = slot_failures(self._store, earlier, self._execution)
            told = {slot: found.error for slot, found in before.items()} | told
        return told

    def _fate(self, slot: int) -> str:
        """What is known about the end of a slot that reported no error."""
        lives = {
            sign.record.started_at_s: (sign, sign.record)
            for sign in self._signs.values()
            if sign.record is not None and sign.record.slot == slot
        }
        if not lives:
            return f"{LOST_EARLIER}{NEVER_WROTE}" if self._rollout.crew == "standing" else NEVER_WROTE
        sign, last = lives[max(lives)]
        if last.state == "gone":
            return "left by itself, or was told to go"
        return (
            f"was killed on {last.host}, or the store refused to be told why it ended, which its own log says; no "
            f"heartbeat for {sign.silent_s:.0f} s"
        )


def _may_count(sign: MemberSign) -> bool:
    """Whether a member may count: its heartbeat is unreadable, or neither the trainer's nor from a member that left."""
    return sign.record is None or (sign.record.state != "gone" and sign.record.pool != TRAIN_POOL)
