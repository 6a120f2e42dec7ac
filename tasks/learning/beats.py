"""Signs of life that a thread repeats while the caller works."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from storage.stores.store import StorageError

log = logging.getLogger(__name__)


@contextmanager
def repeated(beat: Callable[[], None], interval_s: float, name: str, failure: str) -> Iterator[None]:
    """Call `beat` every `interval_s` seconds from a thread called `name`.

    After a StorageError the log has `failure` with the error, and the next call tries again.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(interval_s):
            try:
                beat()
            except StorageError as error:
                log.warning("%s: %s", failure, error)

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
