"""The worker process of one run: `python tasks/sharing/worker_process.py RUN_URL SOCKET DISK`.

`process_workers` drives it. It reads one JSON line for each phase to train or to read ahead, and writes one whenever
what it does changes. It ends when its host ends. A phase that fails ends the process, so the next attempt begins cold.
DISK is a folder for copies of the run's state, empty for none.
"""

import json
import logging
import socket
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from storage.clock import SystemClock
from storage.connect import connect
from storage.local import LocalStore
from storage.phase_failure import fail_phase
from storage.store import StorageError, StoreUnavailable
from tasks.sharing.workers import WorkerState

log = logging.getLogger(__name__)


def main(run_url: str, address: str, disk: str) -> None:
    """Serve the host that listens at the socket `address` until it closes the connection."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {run_url} %(levelname)s %(message)s")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rb") as orders, connection.makefile("wb") as answers:
            _serve(run_url, disk, orders, answers)


def _serve(run_url: str, disk: str, orders: IO[bytes], answers: IO[bytes]) -> None:
    from tasks.sharing.phase_trainer import PhaseTrainer  # noqa: PLC0415 - imports torch

    def tell(state: WorkerState) -> None:
        answers.write(json.dumps(asdict(state)).encode() + b"\n")
        answers.flush()

    # A copy that a power cut damages is found by its digests.
    copies = LocalStore(Path(disk), fsync=False) if disk else None
    trainer: PhaseTrainer | None = None
    for line in orders:
        order = json.loads(line)
        iteration, is_phase = int(order["iteration"]), order["do"] == "train"
        try:
            trainer = trainer or PhaseTrainer(run_url, SystemClock(), tell, copies)
            if is_phase:
                trainer.train(iteration, onto_disk=order["onto_disk"])
            else:
                trainer.prefetch(iteration)
        except Exception as error:
            log.exception("iteration %d", iteration)
            message = f"{type(error).__name__}: {error}"
            if is_phase and not isinstance(error, StoreUnavailable):
                # Another attempt would fail alike, so the run's own train task is to end with this message.
                with suppress(StorageError):
                    fail_phase(connect(run_url), iteration, message)
            tell(WorkerState(phase="failed", iteration=iteration, message=message))
            sys.exit(1)


if __name__ == "__main__":
    # This file's folder holds modules of a package, none of which is to be imported by a name of its own.
    del sys.path[0]
    main(*sys.argv[1:])
