"""Programs on several ranks of this machine: as torchrun starts them, and forked from a server, which is faster."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def talk_of_ranks(directory, count):
    """Run rank_talk on `count` ranks of torchrun: the finished process, and what each rank heard."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    done = subprocess.run(
        [sys.executable, *command, "-m", "tests.tasks.learning.rank_talk", str(directory)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    files = [directory / f"talk{rank}.json" for rank in range(count)]
    return done, [json.loads(file.read_text()) for file in files if file.is_file()]


class RankServer:
    """A process of rank_programs, from which ranks are forked."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._requests, self._answers = process.stdin, process.stdout

    def launch(self, what, directory, count):
        """Run `what` on `count` ranks, all of which must succeed; what each found, where it says so."""
        self._requests.write(json.dumps([what, str(directory), count]).encode() + b"\n")
        self._requests.flush()
        statuses = json.loads(self._answers.readline())
        logs = [(directory / f"{what}{rank}.log").read_text()[-3000:] for rank in range(count)]
        assert statuses == [0] * count, "\n".join(logs)
        files = [directory / f"{what}{rank}.json" for rank in range(count)]
        return [json.loads(file.read_text()) for file in files if file.is_file()]


@contextmanager
def rank_server() -> Iterator[RankServer]:
    """A server, until the end of the block.

    The server is no child of this process's starter: tests of workers kill all that the starter has forked.
    """
    command = [sys.executable, "-m", "tests.tasks.learning.rank_programs"]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield RankServer(process)
        process.stdin.close()
