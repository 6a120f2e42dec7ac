"""Work on tensors in threads, which the caller can end.

The caller is asked at an interval whether to go on, and no thread is left behind.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

CHECK_INTERVAL_S = 0.25
Check = Callable[[], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(
    threads: int, work: Callable[[Item], Result], items: Iterable[Item], check: Check = lambda: None
) -> list[Result]:
    """The results of `work` for every item, in order, `threads` at a time.

    `check` is called in the caller's thread, first at once and then every CHECK_INTERVAL_S. An exception of `check` or
    `work` is raised here as soon as the items that were begun have ended; no further item is begun.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            pending = set(futures)
            while pending:
                check()
                done, pending = wait(pending, CHECK_INTERVAL_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
        finally:
            pool.shutdown(cancel_futures=True)
        return [future.result() for future in futures]
