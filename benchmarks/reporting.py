"""The shared parts of benchmark scripts: interleaved rounds, targets, the conditions of a run, and printing of results.

A script prints a table, and with --json a JSON object as its last line.
"""

import json
import math
import operator
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}
_BOUND = re.compile(r"(<=|>=|==|<|>) (-?[0-9.]+(?:e-?[0-9]+)?)")
OUTSIDE = 0.05
_PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "flytekit")


@dataclass(frozen=True, slots=True)
class Target:
    """A claim with its bound, as in ">= 4"; a missed one is reported as missed.

    interval: where the value lies, if it was measured in rounds. Then the claim holds only if it does at both ends: a
    measure that scatters by more than its bound cannot show it.
    """

    name: str
    value: float
    bound: str
    interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not _BOUND.fullmatch(self.bound):
            raise ValueError(f"bound: value {self.bound!r}; allowed: a comparison, a blank and a number, as in '>= 4'")

    @property
    def met(self) -> bool:
        comparison, limit = self.bound.split(" ")
        values = (self.value, *(self.interval or ()))
        return all(_COMPARISONS[comparison](value, float(limit)) for value in values)


def conditions() -> dict[str, Any]:
    """The machine, versions, threads, load and date of this run."""
    torch = sys.modules.get("torch")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads() if torch is not None else 1,
        "python": platform.python_version(),
        **{package: found for package in _PACKAGES if (found := _version(package)) is not None},
    }


def interleave(arms: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every arm once per round, in an order that changes with each round, and collect what the arms return.

    On a shared machine, only figures from the same minutes can be compared. The changing order spreads the effect of
    one arm on the next over all arms.
    """
    names = list(arms)
    results: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            results[name].append(arms[name]())
    return results


def medians(results: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each arm's results."""
    return {name: statistics.median(values) for name, values in results.items()}


@dataclass(frozen=True, slots=True)
class Measured:
    """The median of a figure over rounds, and an interval that holds the true median in 95 of 100 measurements."""

    median: float
    interval: tuple[float, float]

    def scaled(self, function: Callable[[float], float]) -> "Measured":
        """The same for a monotonic function of the figure."""
        low, high = sorted(map(function, self.interval))
        return Measured(function(self.median), (low, high))

    def target(self, name: str, bound: str) -> Target:
        """The claim that the whole interval keeps the bound."""
        return Target(name, self.median, bound, self.interval)


def measured(values: Sequence[float]) -> Measured:
    """The median and its interval by order statistics, which assumes nothing about how the figure scatters.

    With fewer than 6 rounds no interval holds with 95 %; it is then that of the smallest and the largest.
    """
    ordered, count = sorted(values), len(values)
    cut, outside = 0, 0.5**count
    while cut + 1 <= (count - 1) // 2 and 2 * (outside + math.comb(count, cut + 1) * 0.5**count) <= OUTSIDE:
        cut += 1
        outside += math.comb(count, cut) * 0.5**count
    return Measured(statistics.median(ordered), (ordered[cut], ordered[-1 - cut]))


def ratios(over: Sequence[float], under: Sequence[float]) -> Measured:
    """The ratio of two arms, round by round: what a machine does to both arms of a round cancels out."""
    return measured([a / b for a, b in zip(over, under, strict=True)])


def finish(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    targets: Sequence[Target],
    *,
    as_json: bool,
    notes: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
) -> None:
    """Print the table, the targets and, with `as_json`, the JSON object as the last line.

    Args:
        name: the name of the benchmark.
        rows: one mapping per table row; the columns are the keys of all rows in order of appearance. A value may be
            Measured.
        targets: the claims.
        as_json: whether the last line is JSON.
        notes: further conditions, such as sizes, rounds and options.
        results: further figures at the top level of the JSON object.
    """
    setting = conditions() | dict(notes or {})
    print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in setting.items()))
    print_table(rows)
    for target in targets:
        value = target.value if target.interval is None else Measured(target.value, target.interval)
        word = "met   " if target.met else "MISSED"
        print(f"{word} {target.name}: {shown(value)} (bound {target.bound})")
    if as_json:
        summary = {
            "benchmark": name,
            "conditions": setting,
            "targets": {t.name: _summary(t) for t in targets},
            "rows": [dict(row) for row in rows],
            **dict(results or {}),
        }
        print(json.dumps(summary, default=asdict), flush=True)


def _summary(target: Target) -> dict[str, Any]:
    found: dict[str, Any] = {"value": target.value, "bound": target.bound, "met": target.met}
    return found if target.interval is None else found | {"interval": list(target.interval)}


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per row under the names of the columns, which are the keys of all rows in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([shown(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def shown(value: Any) -> str:
    """A figure as a table shows it."""
    if isinstance(value, Measured):
        return f"{shown(value.median)} [{', '.join(map(shown, value.interval))}]"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
