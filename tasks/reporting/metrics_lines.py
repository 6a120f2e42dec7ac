"""The metrics of all committed iterations as lines of JSON, for people and their tools; derived from the reports."""

import json
import math
from collections.abc import Iterable

from storage.records import ReportRecord


def metrics_lines(history: Iterable[ReportRecord]) -> bytes:
    """One JSON object per report: iteration, weight version, when it was committed (s since 1970), then its metrics.

    A number that JSON does not have (infinite, not a number) becomes null.
    """
    return b"".join(_line(report) for report in history)


def _line(report: ReportRecord) -> bytes:
    values = {name: value if math.isfinite(value) else None for name, value in sorted(report.metrics.items())}
    head = {"iteration": report.iteration, "weight_version": report.weight_version, "time_s": report.created_at_s}
    return json.dumps(head | values, allow_nan=False).encode() + b"\n"
