"""Goes on after what may go wrong with a store or a run, and says so once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from storage.stores.store import StorageError

log = logging.getLogger(__name__)
# What a store, a url or the objects of a run can do to a reader; an error of the program is none of these.
EXPECTED: tuple[type[Exception], ...] = (StorageError, OSError, ValueError)


class ToleratedErrors:
    """What is in trouble now. Each is logged when it begins, and when it is over."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}

    @contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """Within this context an expected error ends the context, and is logged unless `what` had it last time, too."""
        try:
            yield
        except EXPECTED as error:
            kind = type(error).__name__
            if self._present.get(what) != kind:
                log.warning("%s: %s: %s; going on", what, kind, error)
            self._present[what] = kind
        else:
            if self._present.pop(what, None) is not None:
                log.warning("%s: works again", what)
