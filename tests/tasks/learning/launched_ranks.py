"""Programs on several ranks of this machine, as torchrun starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAMS = {"talk": "rank_talk"}


def launch(what, directory, count):
    """Run `what` on `count` ranks: the finished process, and what each rank found."""
    program = f"tests.tasks.learning.{PROGRAMS.get(what, 'rank_programs')}"
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command, "-m", program, what, str(directory)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    files = [directory / f"{what}{rank}.json" for rank in range(count)]
    return done, [json.loads(file.read_text()) for file in files if file.is_file()]
