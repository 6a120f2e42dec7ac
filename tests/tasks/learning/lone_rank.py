"""One of two ranks, whose peer ends without a word, as by SIGKILL: a program that says what it sees of that.

`lone_rank.py FOLDER RANK DOES`: the rank 1 is left alone in what it DOES; it imports no model, as that takes seconds.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from tasks.learning.ranks import joined, misses_peer

ALONE = {
    "sum": lambda ranks: ranks.all_sum([1.0]),
    "gather": lambda ranks: ranks.gather("here"),
    "deal": lambda ranks: ranks.deal([], torch.zeros(3), 0),
}


def main(folder, rank, does):
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    with joined(torch.device("cpu"), Path(folder)) as ranks:
        ranks.barrier()
        if ranks.is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            ALONE[does](ranks)
        except RuntimeError as error:
            sys.stdout.write(f"{misses_peer(error)} {type(error).__name__}: {error}\n")
            sys.stdout.flush()
        # Without the peer it cannot leave.
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
