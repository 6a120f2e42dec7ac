"""Duties: what a lane of storage does again and again, and how many failures in a row it bears."""

import logging
from collections import Counter
from collections.abc import Generator
from typing import Any

from storage.stores.store import StoreUnavailable
from tasks.sampling.session.actions import Action

log = logging.getLogger(__name__)
FAILURES_MAX = 5
Steps = Generator[Action, Any, None]


class Duties:
    """The failures in a row of each duty of a slot."""

    def __init__(self, slot: int) -> None:
        self._slot = slot
        self._failures: Counter[str] = Counter()

    def attempt(self, duty: str, steps: Steps) -> Steps:
        """Do a duty. If the store is unavailable, the duty is tried again when it is next due, and others go on.

        Raises StoreUnavailable at the FAILURES_MAX-th failure of the duty in a row.
        """
        try:
            yield from steps
        except StoreUnavailable as error:
            self._failures[duty] += 1
            log.warning("slot %d: %s failed %d times: %s", self._slot, duty, self._failures[duty], error)
            if self._failures[duty] >= FAILURES_MAX:
                raise
        else:
            self._failures[duty] = 0
