"""A process of a run's worker: `python tasks/sharing/worker_process.py SOCKET RUN_URL`.

`process_workers` sends an order for each phase to train or to read ahead; the process reports every change of its
state. The process ends with the host. A failed phase ends the process, so the next attempt begins cold. Several ranks
get equal orders, and find each other in the folder of SOCKET.
"""

import logging
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from resources.visible_text import show_logs
from tasks.learning.rank_report import RankReport, reporting_to

log = logging.getLogger(__name__)


def main(address: str, run_url: str) -> None:
    """Serve the host that listens at the socket `address` until it closes the connection."""
    rank = f" rank {os.environ['RANK']}" if os.environ["WORLD_SIZE"] != "1" else ""
    show_logs()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {run_url}{rank} %(levelname)s %(message)s")
    with reporting_to(address) as report:
        _serve(run_url, Path(address).parent, report)


def _serve(run_url: str, folder: Path, report: RankReport) -> None:
    from tasks.sharing.phase_trainer import PhaseTrainer, is_lasting, joined_trainer  # noqa: PLC0415 - imports torch

    trainer: PhaseTrainer | None = None
    with ExitStack() as stack:
        for order in report.orders():
            iteration, is_phase = int(order["iteration"]), order["do"] == "train"
            try:
                if trainer is None:
                    trainer = stack.enter_context(
                        joined_trainer(run_url, iteration, folder, lambda state: report.tell(asdict(state)))
                    )
                if is_phase:
                    trainer.train(iteration)
                else:
                    trainer.prefetch(iteration)
            except Exception as error:
                log.exception("iteration %d", iteration)
                report.fail(error, f"{type(error).__name__}: {error}", lasting=is_phase and is_lasting(error))
                # Not by sys.exit: what this rank still shares with others need not be left in order.
                os._exit(1)


if __name__ == "__main__":
    # This file's folder holds modules of a package, none of which is to be imported by a name of its own.
    del sys.path[0]
    main(*sys.argv[1:])
