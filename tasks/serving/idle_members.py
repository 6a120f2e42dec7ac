"""Whether a member would begin a further window at once, by the heartbeats in the windows that are being generated.

A member works on one window at a time, so a window that is planned while all have work only waits; the requests that
come meanwhile are better decoded together.
"""

from collections.abc import Sequence

from storage.clock import Clock
from storage.journal.liveness import Liveness
from storage.records import layout
from storage.stores.store import ObjectStore

# The first heartbeat is written ahead of the first look for work.
_LOOKED = 2


class IdleMembers:
    """The members of the open windows, as a single observer sees them."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._members: dict[int, Liveness] = {}

    def is_any(self, steps: Sequence[int], ttl_s: float) -> bool:
        """Whether a living member holds no response, and a member has claimed responses in each of these windows.

        ttl_s: seconds without a change of its heartbeat after which a member is dead; at the first look all live.
        """
        self._members = {step: self._members.get(step) or Liveness(self._store, step, self._clock) for step in steps}
        idle = 0
        for step, members in self._members.items():
            names = [key.rsplit("/", 1)[1].removesuffix(".json") for key in self._store.list(layout.alive_all(step))]
            signs = members.look(names).values()
            if not any(sign.record is not None and sign.record.claims for sign in signs):
                # A member that is idle elsewhere comes here first.
                return False
            living = [sign.record for sign in signs if sign.record is not None and not sign.lost(ttl_s)]
            idle += sum(record.beat >= _LOOKED and not record.unfinished for record in living)
        return idle > 0
