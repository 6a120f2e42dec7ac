"""One of several ranks of a train task: `python tasks/learning/training_rank.py SOCKET RUN_URL ITERATION EXECUTION`.

`tasks.learning.launch` starts the program on the machine of the task; the program ends with the task.
"""

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from resources.ending import ends_on_notice
from resources.work_log import work_log
from storage.clock import SystemClock
from tasks.learning.rank_report import reporting_to

log = logging.getLogger(__name__)


def main(address: str, run_url: str, iteration: str, execution: str) -> None:
    """Train an iteration with the other ranks of the launcher that listens at the socket `address`."""
    from tasks.learning.launch import MAY_PASS  # noqa: PLC0415
    from tasks.learning.ranks import misses_peer  # noqa: PLC0415
    from tasks.learning.train_iteration import train_iteration  # noqa: PLC0415 - imports torch

    place = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    logging.basicConfig(format=f"%(asctime)s {place} %(levelname)s %(message)s")
    # The first one's work is that of all.
    is_told = os.environ["RANK"] == "0" and not sys.stderr.isatty()
    log_of_work = work_log(f"run {run_url}, iteration {iteration}, {place}") if is_told else nullcontext()
    with reporting_to(address) as report, ends_on_notice(), log_of_work:
        try:
            train_iteration(run_url, int(iteration), execution, SystemClock(), Path(address).parent)
        except Exception as error:  # noqa: BLE001 - the launcher is told
            message = " ".join(f"{place}: {type(error).__name__}: {error}".split())
            # `joined` has logged the traceback.
            log.error("iteration %s of %s: %s", iteration, run_url, message)  # noqa: TRY400
            report.fail(error, message, lasting=not isinstance(error, MAY_PASS) and not misses_peer(error))
            # Not by sys.exit: what this rank still shares with others need not be left in order.
            os._exit(1)
        report.done()


if __name__ == "__main__":
    # This file's folder holds modules of a package, none of which is to be imported by a name of its own.
    del sys.path[0]
    main(*sys.argv[1:])
