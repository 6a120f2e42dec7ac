"""What ranks hear from each other: a program that torchrun starts, which imports no model, as that takes seconds."""

import json
import sys
from pathlib import Path

import torch

from storage.stores.store import StoreUnavailable
from tasks.learning.nonfinite import finite_together
from tasks.learning.optimizer import NonFiniteGradient
from tasks.learning.ranks import RankError, joined


def fail(error):
    raise error


def fail_on(ranks, rank, error):
    if ranks.rank == rank:
        fail(error)


def talk(ranks):
    """What ranks hear from each other; "failures" are what is raised when only the last one raises."""
    heard = {
        "sum": ranks.all_sum([1.5, float(ranks.rank)]),
        "broadcasts": [ranks.broadcast({"batch": n, "from": ranks.rank}) for n in range(2)],
        "gathered": ranks.gather({"rank": ranks.rank, "text": "é" * (1 + 9 * ranks.rank)}),
    }
    try:
        with ranks.failing_together():
            fail_on(ranks, ranks.world_size - 1, ArithmeticError("response 7"))
    except (ArithmeticError, RankError) as error:
        heard["failure"] = f"{type(error).__name__}: {error}"
    try:
        with ranks.failing_together():
            fail_on(ranks, ranks.world_size - 1, StoreUnavailable("no answer"))
    except StoreUnavailable as error:
        heard["unavailable"] = type(error).__name__
    try:
        with finite_together(ranks):
            fail(NonFiniteGradient("loss", [9 - ranks.rank]))
    except NonFiniteGradient as error:
        heard["not finite"] = str(error)
    with ranks.failing_together():
        heard["afterwards"] = 1.0
    return heard


def main(directory):
    with joined(torch.device("cpu")) as ranks:
        (directory / f"talk{ranks.rank}.json").write_text(json.dumps(talk(ranks)))
        if ranks.rank == 1:
            raise LookupError("the second rank is unhappy")
        ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
