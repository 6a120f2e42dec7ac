"""One round of the benchmark on this machine, and its arithmetic on figures made up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.start import FLYTEKIT, NEW, NEXT, Start, row, targets_of
from benchmarks.start_containers import Life, Request

ROOT = Path(__file__).parents[2]


def starts(*works_s: float) -> list[Start]:
    return [Start(read_s=work_s / 2, work_s=work_s, cpu_s=work_s, peak_mb=100 + work_s) for work_s in works_s]


def test_a_row_is_of_medians_with_the_least_and_the_most():
    shown = row("this", NEW, starts(4.0, 2.0, 9.0))
    assert (shown["first read s"], shown["first work s"], shown["peak MB"]) == (2.0, 4.0, 104.0)
    assert shown["from .. to"] == "2.00 .. 9.00"
    alone = Start(read_s=None, work_s=1.0, cpu_s=1.0, peak_mb=80.0)
    assert row("this", FLYTEKIT, [alone])["first read s"] == ""


def test_what_nobody_can_save_is_the_measure_and_the_other_checkout_where_there_is_one():
    ours = {FLYTEKIT: starts(1.0), "iterations": starts(2.0), NEW: starts(7.0), NEXT: starts(3.0)}
    ours["conclude"] = starts(2.5)
    found = {target.name: target for target in targets_of({"this": ours})}
    assert found["iterations_over_flytekit"].value == 2.0
    assert found["plan_new_run_over_flytekit"].value == 7.0
    assert not found["plan_new_run_over_flytekit"].met
    assert not any(name.endswith("_over_other") for name in found)
    other = ours | {"iterations": starts(8.0), NEW: starts(7.0), NEXT: starts(9.0)}
    against = {target.name: target for target in targets_of({"this": ours, "other": other})}
    assert against["iterations_over_other"].value == 0.25
    assert against["plan_new_run_over_other"].value == 1.0
    assert not against["plan_new_run_over_other"].met


def test_a_target_is_met_only_if_it_is_in_every_round_of_few():
    ours = {FLYTEKIT: starts(1.0, 1.0), "iterations": starts(1.0, 9.0), NEW: starts(2.0, 2.0), NEXT: starts(2.0, 2.0)}
    ours["conclude"] = starts(2.0, 2.0)
    found = {target.name: target for target in targets_of({"this": ours})}
    assert found["iterations_over_flytekit"].interval == (1.0, 9.0)
    assert not found["iterations_over_flytekit"].met


def test_the_first_request_that_matches_counts():
    asked = [Request(11.0, "GET /b/x-flyte/inputs.pb?"), Request(12.5, "GET /b/x-run/run.json?")]
    life = Life(wall_s=3.0, cpu_s=2.0, peak_mb=1.0, began_s=10.0, requests=asked)
    assert life.until(".*x-run") == 2.5
    assert life.until("PUT ") is None


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_round_goes_through_an_iteration_in_the_containers_commands():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FLYTE"))}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.start", "--rounds", "1", "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["benchmark"] == "start"
    found = {each["process"]: each for each in summary["rows"]}
    assert list(found) == [FLYTEKIT, "iterations", NEW, "rollout", "train", "conclude", NEXT]
    for name in (NEW, "rollout", "train", "conclude", NEXT):
        assert 0 < found[name]["first read s"] <= found[name]["first work s"]
    assert found["iterations"]["first read s"] == ""
    # Memory hardly depends on what else the machine does: malloc's arenas, one per processor and thread, are 5 % of it.
    peaks = {name: target for name, target in summary["targets"].items() if name.endswith("_peak_over_flytekit")}
    assert len(peaks) == 4
    # The plan of a new run tries the model in a process of its own, which imports torch.
    trial = peaks.pop("plan_new_run_peak_over_flytekit")
    bounds = {name: float(target["bound"].removeprefix("<= ")) for name, target in peaks.items()}
    assert all(target["value"] < 1.05 * bounds[name] for name, target in peaks.items()), peaks
    assert trial["value"] < 7
    assert found["rollout"]["peak MB"] > found[NEXT]["peak MB"] + 100
