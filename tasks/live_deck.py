"""The Deck of a task while it runs: in Flyte's console, what `gleaner watch` shows in a terminal."""

import contextvars
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from flytekit import Deck

from resources.granted import is_in_a_pod
from storage.clock import Clock, SystemClock
from storage.stores.connect import connect

log = logging.getLogger(__name__)
TAB = "Live"
# A page is stored at most so often.
INTERVAL_S = 30.0
# For a look that is under way when the task ends.
LAST_LOOK_MAX_S = 5.0


@contextmanager
def live_deck(run_url: str) -> Iterator[None]:
    """While the block runs in a pod, look at the run every INTERVAL_S, and publish the look.

    The page has the progress, the reward so far, the members, and the groups that the trainer waits for. Needs
    `enable_deck` of the task. Elsewhere nothing is looked at.
    """
    if not is_in_a_pod():
        yield
        return
    ended, page = threading.Event(), Deck(TAB)
    # Flyte's context belongs to the thread of the task.
    looks = (contextvars.copy_context().run, publish_looks, run_url, page, ended, SystemClock())
    # Flytekit keeps an event loop for each name of a thread. The loop of the task's own name is there already, and
    # flytekit closes it at the end.
    name = threading.current_thread().name
    looker = threading.Thread(target=lambda run, *arguments: run(*arguments), args=looks, name=name, daemon=True)
    looker.start()
    try:
        yield
    finally:
        ended.set()
        looker.join(LAST_LOOK_MAX_S)


def publish_looks(run_url: str, page: Deck, ended: threading.Event, clock: Clock) -> None:
    """Look until `ended`, and then once more, for the page that Flyte stores of an ended task."""
    from tasks.reporting.watch import Watcher  # noqa: PLC0415 - when the task runs
    from tasks.reporting.watch_screen import live_page  # noqa: PLC0415

    watcher: Watcher | None = None
    while True:
        is_last = ended.is_set()
        try:
            watcher = watcher or Watcher(connect(run_url), clock)
            page._html = live_page(watcher.look())  # noqa: SLF001 - `append` would keep the older looks
            if not is_last:
                # Flyte itself stores the page of a task that has ended.
                Deck.publish()
        except Exception as error:  # noqa: BLE001 - a look for people must not disturb the run
            log.debug("no look at %s: %s", run_url, error)
        if is_last:
            return
        ended.wait(INTERVAL_S)
