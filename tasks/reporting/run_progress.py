"""The progress of a run that a process on this machine works on: in the one line of `progress`, or in the log."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from resources.work_log import at_work, which_of_chain
from storage.clock import SystemClock
from storage.stores.connect import connect
from tasks.reporting.crew_view import RunView
from tasks.reporting.progress import progress, shows_line
from tasks.reporting.watch import Watcher

log = logging.getLogger(__name__)
LOOK_INTERVAL_S = 1.0
# Of a look that is for a log, which has a line now and then.
LOG_LOOK_INTERVAL_S = 15.0
# For a look that is under way; a store that does not answer is not waited for.
LAST_LOOK_MAX_S = 2.0


@contextmanager
def run_progress(run_url: str) -> Iterator[None]:
    """While the block runs, look at the run once a second, as `gleaner watch` does, and show where it is.

    Without a terminal, as in a pod, nothing is looked at.
    """
    with progress() as progress_line:
        if not progress_line.is_shown:
            yield
            return
        ended = threading.Event()
        looker = threading.Thread(
            target=_look, args=(run_url, progress_line.tell, ended, LOOK_INTERVAL_S), name="run progress", daemon=True
        )
        looker.start()
        try:
            yield
        finally:
            ended.set()
            looker.join(LAST_LOOK_MAX_S)


@contextmanager
def crew_progress(run_url: str) -> Iterator[None]:
    """Show the progress while a crew of this machine generates; without a terminal, in the log."""
    with run_progress(run_url):
        if shows_line():
            yield
            return
        seen: list[str] = []
        ended = threading.Event()

        def note(what: str, done: int, total: int) -> None:
            seen[:] = [f"{what} ({done:,} of {total:,})" if total else what]

        at_work("a crew of this machine generates", lambda: "".join(seen))
        looks = (run_url, note, ended, LOG_LOOK_INTERVAL_S)
        threading.Thread(target=_look, args=looks, name="run progress", daemon=True).start()
        try:
            yield
        finally:
            ended.set()


def _look(run_url: str, tell: Callable[[str, int, int], None], ended: threading.Event, interval_s: float) -> None:
    watcher: Watcher | None = None
    while not ended.is_set():
        try:
            watcher = watcher or Watcher(connect(run_url), SystemClock())
            line = run_line(watcher.look())
            if not ended.is_set():
                tell(*line)
        except Exception as error:  # noqa: BLE001 - a look for people must not disturb the run
            log.debug("no look at %s: %s", run_url, error)
        ended.wait(interval_s)


def run_line(view: RunView) -> tuple[str, int, int]:
    """Where the run is, with its reward, and how many responses of how many have ended while they are generated."""
    totals = view.totals
    parts = [f"iteration {view.iteration}{which_of_chain()}: {view.phase}"]
    if totals.tokens_per_s is not None and view.phase == "rollout":
        parts.append(f"{totals.tokens_per_s:,.0f} tokens/s")
    if totals.reward is not None:
        parts.append(f"reward so far {totals.reward:.3f}")
    if view.phase != "rollout":
        return ", ".join(parts), 0, 0
    return ", ".join([*parts, "responses"]), totals.responses_done, totals.responses_planned
