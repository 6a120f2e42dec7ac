"""A race of writers, threads or processes, to create the same keys, and the count of winners.

The count shows whether a store creates atomically. `python -m storage.stores.race` runs the processes: the module forks
the writers before anything is connected.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from storage.stores.connect import connect
from storage.stores.store import ObjectMissing, ObjectStore, StorageError, StoreUnavailable

ROOT = Path(__file__).parents[2]
# Longer than a network packet and a disk block, so that a torn body would show.
BODY_BYTES = 20_000
NO_WRITER = -1
# More than a create and a read may take with all their retries.
BARRIER_S = 120.0
BROKEN = "a writer stopped, or took too long for one key"
DIED = "a writer died"


@dataclass(frozen=True)
class Attempt:
    """The result of one writer at one key.

    Attributes:
        won: True if the writer's create succeeded.
        seen: the writer whose whole body was read afterwards; NO_WRITER for any other body.
    """

    won: bool
    seen: int


@dataclass(frozen=True)
class Race:
    """`attempts[writer][n]` is that writer's attempt at `keys[n]`."""

    keys: Sequence[str]
    attempts: Sequence[Sequence[Attempt]]

    def creates(self) -> int:
        return len(self.keys) * len(self.attempts)

    def faults(self) -> list[str]:
        """One line for every key without exactly one winner, or whose winner's whole body some writer did not read."""
        return [fault for number in range(len(self.keys)) for fault in self._faults_of(number)]

    def _faults_of(self, number: int) -> Iterator[str]:
        attempts = [of_writer[number] for of_writer in self.attempts]
        winners = [writer for writer, attempt in enumerate(attempts) if attempt.won]
        if len(winners) != 1:
            yield f"{len(winners)} of {len(attempts)} writers created {self.keys[number]!r}"
            return
        others = sum(attempt.seen != winners[0] for attempt in attempts)
        if others:
            yield f"{others} of {len(attempts)} writers did not read the winner's whole body at {self.keys[number]!r}"


def race_threads(store: ObjectStore, keys: Sequence[str], writers: int) -> Race:
    """Let `writers` threads of this process create every key at the same moment. Raises what the store raises.

    Raises StoreUnavailable, too, if a writer keeps the others waiting for longer than any call may take.
    """
    barrier = threading.Barrier(writers, timeout=BARRIER_S)

    def run(writer: int) -> list[Attempt]:
        with _breaking(barrier):
            return _attempt_all(store, keys, writer, barrier.wait)

    with ThreadPoolExecutor(writers) as pool, _breaking(barrier):
        futures = [pool.submit(run, writer) for writer in range(writers)]
        # The store's own error comes before the errors of the writers that waited for the failed one.
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            first = min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
            if isinstance(first, threading.BrokenBarrierError):
                raise StoreUnavailable(f"racing threads on {store.url}: {BROKEN}") from first
            raise first
        return Race(keys, [future.result() for future in futures])


def race_processes(url: str, keys: Sequence[str], writers: int) -> Race:
    """Race `writers` new processes, each with its own store, for the keys. Raises StoreUnavailable with their error."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "storage.stores.race", url, str(writers)]
    with subprocess.Popen(  # noqa: S603 - this interpreter and this module
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(json.dumps(list(keys)))
        except BaseException:
            # Even after Ctrl-C no writer may go on writing what is being removed; the pipe stays open until they have
            # ended.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # They were to read on, which must not hide why they have ended.
            with suppress(BrokenPipeError):
                process.communicate()
            raise
    if process.returncode != 0:
        raise StoreUnavailable(f"racing processes on {url}: {(errors.strip().splitlines() or ['they died'])[-1]}")
    return Race(keys, [[Attempt(won, seen) for won, seen in of_writer] for of_writer in json.loads(output)])


def _attempt_all(store: ObjectStore, keys: Sequence[str], writer: int, wait: Callable[[], object]) -> list[Attempt]:
    attempts = []
    for key in keys:
        wait()
        attempts.append(_attempt(store, key, writer))
    return attempts


def _attempt(store: ObjectStore, key: str, writer: int) -> Attempt:
    try:
        created = store.create(key, _body(key, writer))
    except StoreUnavailable:
        created = False
    try:
        seen = _writer_of(key, store.get(key))
    except ObjectMissing:
        seen = NO_WRITER
    # An answer can be lost: the writer whose body is stored has won, whatever it was told (docs/format.md algorithm C).
    return Attempt(created or seen == writer, seen)


def _body(key: str, writer: int) -> bytes:
    line = f"{writer} wrote {key}\n".encode()
    return line * (BODY_BYTES // len(line))


def _writer_of(key: str, body: bytes) -> int:
    """The writer of a whole body; NO_WRITER for anything else."""
    name = body.split(b" ", 1)[0]
    return int(name) if name.isdigit() and body == _body(key, int(name)) else NO_WRITER


@contextmanager
def _breaking(barrier: threading.Barrier | Barrier) -> Iterator[None]:
    """Break the barrier if a writer fails, for the remaining writers not to wait."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise


def _run_process(url: str, keys: Sequence[str], writer: int, barrier: Barrier, results: Connection) -> None:
    try:
        with _breaking(barrier):
            attempts = _attempt_all(connect(url), keys, writer, barrier.wait)
            results.send([(attempt.won, attempt.seen) for attempt in attempts])
    except threading.BrokenBarrierError:
        results.send(BROKEN)
    except (StorageError, OSError) as error:
        results.send(str(error))


def main(url: str, writers: int) -> None:
    """Race in forked processes for the keys on standard input, and print each one's attempts as JSON."""
    keys: list[str] = json.load(sys.stdin)
    # This imports what this kind of store needs, once for all writers.
    connect(url)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(writers, timeout=BARRIER_S)
    processes, receivers = [], []
    for writer in range(writers):
        receiver, results = context.Pipe(duplex=False)
        process = context.Process(target=_run_process, args=(url, keys, writer, barrier, results), daemon=True)
        process.start()
        # Only the writer holds the sending end now, so its death ends the pipe.
        results.close()
        processes.append(process)
        receivers.append(receiver)
    try:
        received = _gather(receivers)
    finally:
        for process in processes:
            process.kill()
    errors = [each for each in received if isinstance(each, str)]
    if errors:
        sys.exit(min(errors, key=lambda error: error == BROKEN))
    json.dump(received, sys.stdout)


def _gather(receivers: Sequence[Connection]) -> list[Any]:
    """The messages of the writers, in their order; [DIED] as soon as one ends without a message."""
    received: dict[Connection, Any] = {}
    while len(received) < len(receivers):
        # The writers end together: after the first message the others need no longer than for one key.
        pending = [each for each in receivers if each not in received]
        ready = wait(pending, BARRIER_S if received else None)
        if not ready:
            return [BROKEN]
        try:
            received |= {each: each.recv() for each in pending if each in ready}
        except EOFError:
            return [DIED]
    return [received[each] for each in receivers]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
