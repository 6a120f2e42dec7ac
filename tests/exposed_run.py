"""A small run with one committed iteration and one at work, as Prometheus would read it; and a reader of its format."""

import re
from dataclasses import replace
from pathlib import Path

from storage.clock import ManualClock, SystemClock
from storage.records import layout, records
from storage.records.records import BatchRecord, GradedResponse, ReportRecord
from storage.records.run import read_plan
from storage.stores.connect import connect
from tasks.reporting.run_metrics import RunMetrics
from tests.journals import Incarnation, beat
from tests.kept_failures import keep_slot
from tests.small_run import commit_iteration, config, model_directory, plan_iteration, roll_out, train_small

SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def exposed(folder: Path) -> tuple[str, ReportRecord]:
    """The metrics of the run, every family with a value, and the report of its committed iteration."""
    url = str(folder / "run")
    settings = config(url, model_directory(folder / "model"), pools={"rollout": {"count": 2, "usd_per_hour": 1.5}})
    plan_iteration(settings, SystemClock())
    roll_out(url, 0)
    train_small(url, 0)
    report = commit_iteration(url, 0)
    plan_iteration(settings)
    store = connect(url)
    plan = read_plan(store, 1)
    member = Incarnation(store, plan, 0, "00000-abcd")
    first_group = plan.responses_of(0)[:3]
    for response in first_group:
        member.write(response, [1, 2, 3])
    records.put(store, layout.alive(1, "00000-abcd"), replace(beat("00000-abcd", number=1), tokens_per_s=12.5))
    graded = tuple(
        GradedResponse(
            response=response,
            length=3,
            policy_length=3,
            finish_reason="stop",
            lineage=(),
            reward=0.25,
            rewards={"length": 0.25},
        )
        for response in first_group
    )
    records.put(store, layout.batch(1, 0), BatchRecord(iteration=1, number=0, responses=graded))
    keep_slot(store, 1, "exec", 1, "EngineError: no kernel")
    return RunMetrics(store, ManualClock()).look(), report


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """(labels, value) by family; raises AssertionError for what Prometheus does not read."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    told: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, what = line.split(" ", 3)
            assert name not in told, f"{name} is there twice"
            assert what
        elif line.startswith("# TYPE "):
            _, _, name, told[name] = line.split(" ")
            assert told[name] == ("counter" if name.endswith("_total") else "gauge")
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert list(told)[-1] == match[1], f"{match[1]} stands apart from its type"
            found.setdefault(match[1], []).append((dict(LABEL.findall(match[2])), float(match[3])))
    return found
