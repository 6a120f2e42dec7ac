"""Backfill: while no phase is expected for a while, a member generates on the host's device for one of the runs.

The member is a process of its own, the same as `gleaner join` runs. It has the device until it has ended. The journal
has what it flushed, so nothing is lost when it leaves, and it may leave at any moment.
"""

import logging
from collections.abc import Collection, Mapping

from tasks.sharing.state_cache import Need
from tasks.sharing.workers import BackfillMember

log = logging.getLogger(__name__)
# A member that has ended by itself is not started again for so long.
PAUSE_S = 120.0


def is_quiet(needs: Collection[Need], now_s: float, quiet_s: float) -> bool:
    """Whether the state of no run is expected to be needed within `quiet_s`. Pure."""
    return all(each.needed_s >= now_s + quiet_s for each in needs)


def choose_backfill(
    needs: Collection[Need], unfinished: Mapping[str, float], now_s: float, quiet_s: float
) -> str | None:
    """The run for which a member is to generate now: the one with most unfinished tokens; ties are decided by id.

    None: a phase is expected too soon, or no run has unfinished tokens. Pure.
    """
    helped = [run for run, tokens in unfinished.items() if tokens > 0] if is_quiet(needs, now_s, quiet_s) else []
    return min(helped, key=lambda run: (-unfinished[run], run), default=None)


class Backfill:
    """The member of one host. Times are the host's seconds. run: whom it helps; None if the device is free of it."""

    def __init__(self, member: BackfillMember | None, quiet_s: float | None, notice_s: float) -> None:
        self._member = member
        self._quiet_s = quiet_s
        self._notice_s = notice_s
        self._noticed_s: float | None = None
        self._paused_until_s = 0.0
        self.run: str | None = None

    def may_begin(self, needs: Collection[Need], now_s: float) -> bool:
        """Whether a member is to generate if some run has unfinished tokens."""
        if self._member is None or self._quiet_s is None or self.run is not None or now_s < self._paused_until_s:
            return False
        return is_quiet(needs, now_s, self._quiet_s)

    def begin(self, needs: Collection[Need], unfinished: Mapping[str, float], now_s: float) -> None:
        """Start a member, if one is to generate."""
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
        """Look whether the member has ended; kill it if it takes too long after a notice."""
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
        """Give the member notice, once: it flushes and leaves."""
        if self._member is not None and self.run is not None and self._noticed_s is None:
            self._noticed_s = now_s
            self._member.notice()
