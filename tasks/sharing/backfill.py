"""Backfill: while no phase is expected for a while, a member generates on the host's device for one of the runs.

The member is a process as `gleaner join` runs one, and has the device until the process ends. The member may leave at
any moment: the journal keeps every flushed token.
"""

import logging
from collections.abc import Collection, Mapping

from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import PlanRecord
from storage.records.run import exists, read_plan, read_report
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from tasks.sharing.state_cache import Need
from tasks.sharing.workers import BackfillMember

log = logging.getLogger(__name__)
# Seconds until a member that has ended by itself is started again.
PAUSE_S = 120.0


def is_quiet(needs: Collection[Need], now_s: float, quiet_s: float) -> bool:
    """Whether the state of no run is expected to be needed within `quiet_s`. Pure."""
    return all(each.needed_s >= now_s + quiet_s for each in needs)


def choose_backfill(
    needs: Collection[Need], unfinished: Mapping[str, float], now_s: float, quiet_s: float
) -> str | None:
    """The run for which a member should generate now: the run with most unfinished tokens; ties are decided by id.

    None: a phase is expected too soon, or no run has unfinished tokens. Pure.
    """
    helped = [run for run, tokens in unfinished.items() if tokens > 0] if is_quiet(needs, now_s, quiet_s) else []
    return min(helped, key=lambda run: (-unfinished[run], run), default=None)


def unfinished_tokens(store: ObjectStore, iteration: int) -> float:
    """How many tokens of an iteration are still to be generated: a guess, to choose which run a host helps.

    The unfinished responses by the members' heartbeats (without heartbeats: all responses of the plan) times the mean
    length in the previous iteration (without a report: `max_completion_length`). 0 if the iteration is unplanned or
    closed, and in a run with turns, because a host runs no functions of a run. Costs a LIST and one GET per member.
    Raises the errors of the store.
    """
    if exists(store, layout.closed(iteration)):
        return 0.0
    try:
        plan = read_plan(store, iteration)
    except ObjectMissing:
        return 0.0
    return 0.0 if plan.config.get("turns") else _responses(store, plan) * _mean_length(store, plan)


def _responses(store: ObjectStore, plan: PlanRecord) -> int:
    members = []
    for key in store.list(layout.alive_all(plan.iteration)):
        try:
            members.append(records.read(store, HeartbeatRecord, key))
        except (ObjectMissing, CorruptObject):
            continue
    return sum(each.unfinished for each in members) if members else plan.num_responses


def _mean_length(store: ObjectStore, plan: PlanRecord) -> float:
    if plan.iteration:
        try:
            return read_report(store, plan.iteration - 1).metrics["completions/mean_length"]
        except (ObjectMissing, KeyError):
            pass
    return float(plan.sampling.max_completion_length)


class Backfill:
    """The member of one host. Times are the host's seconds. run: the helped run; None if no member has the device."""

    def __init__(self, member: BackfillMember | None, quiet_s: float | None, notice_s: float) -> None:
        self._member = member
        self._quiet_s = quiet_s
        self._notice_s = notice_s
        self._noticed_s: float | None = None
        self._paused_until_s = 0.0
        self.run: str | None = None

    def may_begin(self, needs: Collection[Need], now_s: float) -> bool:
        """Whether a member should generate if some run has unfinished tokens."""
        if self._member is None or self._quiet_s is None or self.run is not None or now_s < self._paused_until_s:
            return False
        return is_quiet(needs, now_s, self._quiet_s)

    def begin(self, needs: Collection[Need], unfinished: Mapping[str, float], now_s: float) -> None:
        """Start a member if `choose_backfill` names a run."""
        if self._member is None or self._quiet_s is None:
            return
        chosen = choose_backfill(needs, unfinished, now_s, self._quiet_s)
        if chosen is None:
            # Reading what is unfinished costs requests.
            self._paused_until_s = now_s + self._quiet_s
            return
        [run_url] = [each.run.run_url for each in needs if each.run.id == chosen]
        log.info("no phase is expected for %.0f s; a member generates for %s", self._quiet_s, run_url)
        self._member.start(run_url)
        self.run, self._noticed_s = chosen, None

    def attend(self, now_s: float) -> None:
        """Look whether the member has ended; kill a member that still runs `notice_s` after the notice."""
        if self._member is None or self.run is None:
            return
        if not self._member.is_running:
            if self._noticed_s is None:
                log.warning("the member that helped run %s has ended by itself", self.run)
                self._paused_until_s = now_s + PAUSE_S
            self.run = None
        elif self._noticed_s is not None and now_s - self._noticed_s > self._notice_s:
            log.error("the member that helps run %s has not left for %.0f s; it is killed", self.run, self._notice_s)
            self._member.kill()
            self.run = None

    def leave(self, now_s: float) -> None:
        """Give the member notice, once: the member flushes and leaves."""
        if self._member is not None and self.run is not None and self._noticed_s is None:
            self._noticed_s = now_s
            self._member.notice()
