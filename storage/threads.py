"""Work on tensors in threads, that its caller can end.

Owns how long it takes until a caller is asked, and that no thread is left behind. Does not know what the work is.
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
    """`work` of every item, in order, `threads` at a time.

    `check` is called in the caller's thread, first and then every CHECK_INTERVAL_S. Whatever it or `work` raises is
    raised here once the items that were begun have ended; no other is begun.
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
