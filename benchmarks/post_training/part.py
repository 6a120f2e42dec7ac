"""A part of the benchmark: what it measures, and what it must reach."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting import Target


@dataclass(frozen=True)
class Outcome:
    """The outcome of a part.

    Attributes:
        rows: The rows of its table.
        targets: What it must reach.
        results: Further figures for the JSON.
    """

    rows: Sequence[Mapping[str, Any]]
    targets: Sequence[Target]
    results: Mapping[str, Any]


# A function of an empty folder, and of the seeds to run.
Part = Callable[[Path, Sequence[int]], Outcome]
