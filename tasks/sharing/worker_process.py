"""The worker process of one run: `python -m tasks.sharing.worker_process RUN_URL`, driven by `process_workers`.

It reads one JSON line for each phase to train, and writes one whenever what it does changes. It ends when its input
ends. A phase that fails ends the process, so the next attempt begins cold.
"""

import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import BinaryIO

from resources.process import end_with
from storage.clock import SystemClock
from storage.connect import connect
from storage.phase_failure import fail_phase
from storage.store import StorageError, StoreUnavailable
from tasks.sharing.workers import WorkerState

log = logging.getLogger(__name__)


def main(run_url: str) -> None:
    """Serve until standard input ends."""
    end_with(os.getppid())
    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {run_url} %(levelname)s %(message)s")
    _serve(run_url, sys.stdin.buffer, answers)


def _serve(run_url: str, orders: BinaryIO, answers: BinaryIO) -> None:
    from tasks.sharing.phase_trainer import PhaseTrainer  # noqa: PLC0415 - imports torch

    def tell(state: WorkerState) -> None:
        answers.write(json.dumps(asdict(state)).encode() + b"\n")
        answers.flush()

    trainer: PhaseTrainer | None = None
    for line in orders:
        iteration = int(json.loads(line)["iteration"])
        try:
            trainer = trainer or PhaseTrainer(run_url, SystemClock(), tell)
            trainer.train(iteration)
        except Exception as error:
            log.exception("iteration %d", iteration)
            message = f"{type(error).__name__}: {error}"
            if not isinstance(error, StoreUnavailable):
                # Another attempt would fail alike, so the run's own train task is to end with this message.
                with suppress(StorageError):
                    fail_phase(connect(run_url), iteration, message)
            tell(WorkerState(phase="failed", iteration=iteration, message=message))
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
