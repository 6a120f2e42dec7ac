"""Whether a member would begin a further window at once, by the heartbeats in the windows that are being generated.

A member works on one window at a time, so a window that is planned while all have work only waits; the requests that
come meanwhile are better decoded together.
"""

from collections.abc import Sequence

from storage.journal.liveness import read_heartbeat
from storage.records import layout
from storage.stores.store import ObjectStore

# The first heartbeat is written ahead of the first look for work.
_LOOKED = 2


def is_any_idle(store: ObjectStore, steps: Sequence[int], now_s: float, ttl_s: float) -> bool:
    """Whether a living member holds no response, and a member has claimed responses in each of these windows.

    now_s: wall-clock seconds; a heartbeat older than ttl_s is a dead member's.
    """
    idle = 0
    for step in steps:
        read = (read_heartbeat(store, key) for key in store.list(layout.alive_all(step)))
        found = [each for each in read if each is not None]
        if not any(each.claims for each in found):
            # A member that is idle elsewhere comes here first.
            return False
        living = [each for each in found if each.state != "gone" and now_s - each.updated_at_s < ttl_s]
        idle += sum(each.beat >= _LOOKED and not each.unfinished for each in living)
    return idle > 0
