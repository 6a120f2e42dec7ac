"""What a run does, in the one line of `progress`, while a process on this machine works on it."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from storage.clock import SystemClock
from storage.connect import connect
from tasks.reporting.crew_view import RunView
from tasks.reporting.progress import ProgressLine, progress
from tasks.reporting.watch import Watcher

log = logging.getLogger(__name__)
LOOK_INTERVAL_S = 1.0
# For a look that is under way; a store that does not answer is not waited for.
LAST_LOOK_MAX_S = 2.0


@contextmanager
def run_progress(run_url: str) -> Iterator[None]:
    """While the block runs, look at the run once a second, as `gleaner watch` does, and show where it is.

    Without a terminal, as in a pod, nothing is looked at.
    """
    with progress() as shown:
        if not shown.is_shown:
            yield
            return
        ended = threading.Event()
        looker = threading.Thread(target=_look, args=(run_url, shown, ended), name="run progress", daemon=True)
        looker.start()
        try:
            yield
        finally:
            ended.set()
            looker.join(LAST_LOOK_MAX_S)


def _look(run_url: str, shown: ProgressLine, ended: threading.Event) -> None:
    watcher: Watcher | None = None
    while not ended.is_set():
        try:
            watcher = watcher or Watcher(connect(run_url), SystemClock())
            told = run_line(watcher.look())
            if not ended.is_set():
                shown.tell(*told)
        except Exception as error:  # noqa: BLE001 - a look for people must not disturb the run
            log.debug("no look at %s: %s", run_url, error)
        ended.wait(LOOK_INTERVAL_S)


def run_line(view: RunView) -> tuple[str, int, int]:
    """Where the run is, and how many responses of how many have ended while they are generated."""
    totals = view.totals
    parts = [f"iteration {view.iteration}: {view.phase}"]
    if view.phase != "rollout":
        return parts[0], 0, 0
    if totals.tokens_per_s is not None:
        parts.append(f"{totals.tokens_per_s:,.0f} tokens/s")
    if totals.reward is not None:
        parts.append(f"reward so far {totals.reward:.3f}")
    return ", ".join([*parts, "responses"]), totals.responses_done, totals.responses_planned
