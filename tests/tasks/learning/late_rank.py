"""One of two ranks; the second comes late to a place where the first waits for it: `late_rank.py FOLDER RANK WHERE`.

The first one's log is on its standard error. `busy` is a place where neither waits for the other.
"""

import os
import sys
import time
from pathlib import Path

import torch

from tasks.learning.ranks import joined

LATE_S = 13.0


def main(folder, rank, where):
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")

    def late(here):
        if here == where and (rank == "1" or where == "busy"):
            time.sleep(LATE_S)

    late("join")
    with joined(torch.device("cpu"), Path(folder)) as ranks:
        # Unequally many messages: only the first rank sends.
        for _ in range(3):
            ranks.deal([torch.zeros(3)] * 2, torch.zeros(3), 0)
        late("sum")
        ranks.all_sum([1.0])
        late("deal")
        ranks.deal([torch.zeros(3)] * 2, torch.zeros(3), 1)
        late("busy")
        late("leave")


if __name__ == "__main__":
    main(*sys.argv[1:])
