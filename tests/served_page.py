"""A server of a run's page in this process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from storage.clock import ManualClock
from storage.stores.store import ObjectStore
from tasks.viewing.page_server import PageServer
from tasks.viewing.run_reader import RunReader


@contextmanager
def served(store: ObjectStore) -> Iterator[PageServer]:
    """A server of the run's page, in a thread of its own."""
    server, ready, loop = PageServer(RunReader(store), ManualClock(), 0), threading.Event(), asyncio.new_event_loop()

    def work() -> None:
        runner = loop.run_until_complete(server.start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
