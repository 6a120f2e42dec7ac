"""A context that swallows the expected errors of a store or a run, and logs the first of a series."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from storage.stores.store import StorageError

log = logging.getLogger(__name__)
# What a store, a url or the objects of a run can do to a reader; an error of the program is none of these.
EXPECTED: tuple[type[Exception], ...] = (StorageError, OSError, ValueError)


@dataclass(slots=True)
class Attempt:
    """The work of one context. failed: an expected error ended the work."""

    failed: bool = False


class ToleratedErrors:
    """The subjects that fail at present. A log line tells when a subject begins to fail, and when it works again."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}

    @contextmanager
    def tolerated(self, what: str) -> Iterator[Attempt]:
        """Swallow an expected error of the subject `what`; the caller goes on below the context, and asks `failed`.

        The error is logged unless the subject's last attempt failed with an error of equal type.
        """
        attempt = Attempt()
        try:
            yield attempt
        except EXPECTED as error:
            attempt.failed = True
            kind = type(error).__name__
            if self._present.get(what) != kind:
                log.warning("%s: %s: %s; going on", what, kind, error)
            self._present[what] = kind
        else:
            if self._present.pop(what, None) is not None:
                log.warning("%s: works again", what)
