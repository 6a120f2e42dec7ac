"""One of two ranks, of which the second is a process that has connected in its place, and does not know their secret.

`false_rank.py FOLDER RANK`: what the first one says of that is printed.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from tasks.learning.loopback import file_store
from tasks.learning.ranks import RankError, joined


def main(folder, rank):
    if rank == "1":
        store = file_store(Path(folder), 2, timedelta(minutes=5))
        dist.init_process_group("gloo", store=PrefixStore("process_group", store), rank=1, world_size=2)
        dist.isend(torch.zeros(32, dtype=torch.uint8), 0).wait()
        dist.irecv(torch.zeros(32, dtype=torch.uint8), 0).wait()
        os._exit(0)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    try:
        with joined(torch.device("cpu"), Path(folder)):
            sys.stdout.write("joined\n")
            sys.stdout.flush()
            os._exit(0)
    except RankError as error:
        sys.stdout.write(f"{error}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
