"""Production's thread pools in virtual time: what they would do side by side is done in turn, by the caller.

A process of virtual time can only wait in its own thread. A pool of threads could take the same order.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from storage.journal import claims, journal, liveness, retention
from storage.weights import fetch, inspection, objects, tensor_sets, versions

POOLS = (claims, journal, liveness, retention, tensor_sets, versions)
IN_THREADS = (fetch, inspection, objects, tensor_sets)


class OneThread:
    """The part of ThreadPoolExecutor that production uses, without threads."""

    def __init__(self, *_: object) -> None:
        """Takes the arguments of ThreadPoolExecutor and needs none of them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing is left running."""

    def map(self, work: Callable[..., Any], *items: Iterable[Any]) -> Iterator[Any]:
        """The results of `work`, all of which is done at once."""
        return iter([work(*each) for each in zip(*items, strict=False)])


def in_turn(
    _: int, work: Callable[[Any], Any], items: Iterable[Any], check: Callable[[], None] = lambda: None
) -> list[Any]:
    """In place of `storage.threads.in_threads`; `check` is called before every item."""
    results = []
    for item in items:
        check()
        results.append(work(item))
    return results


@contextmanager
def threads_in_turn() -> Iterator[None]:
    """Within this context, storage's thread pools of the whole process work in the caller's thread."""
    changed: list[tuple[dict[str, Any], str, object]] = [
        (vars(each), "ThreadPoolExecutor", OneThread) for each in POOLS
    ]
    changed += [(vars(each), "in_threads", in_turn) for each in IN_THREADS]
    before = [(names, name, names[name]) for names, name, _ in changed]
    for names, name, instead in changed:
        names[name] = instead
    try:
        yield
    finally:
        for names, name, ours in before:
            names[name] = ours
