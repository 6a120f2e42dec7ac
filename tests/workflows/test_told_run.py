"""What `pyflyte run` says of training where its output is no terminal, as under nohup, tee, CI and Slurm."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.small_run import document, model_directory
from tests.terminals import on_terminal
from tests.whole_runs import LIMIT_S, ROOT, workflow_command

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC "
TASK = """
from flytekit import task
from tasks.task_log import logged_task

@task
def train() -> int:
    with logged_task("run r, iteration 0", None, "train"):
        return 1

print(train())
"""


@pytest.mark.slow
def test_without_a_terminal_each_phase_and_each_committed_iteration_is_a_line_and_the_end_a_sentence(tmp_path):
    url = str(tmp_path / "a run")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(document(url, model_directory(tmp_path / "model"))))
    program = str(Path(sys.executable).parent / "pyflyte")
    done = subprocess.run(
        [program, *workflow_command("training", "--config", str(file), "--count", "2")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT_S,
        check=True,
    )
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    said = [re.sub(rf"^{TIME}run {re.escape(url)}, ", "", line) for line in done.stderr.splitlines()]
    said = [line for line in said if line.endswith(": begins") or ": committed: " in line]
    numbers = r"reward -?\d\.\d{3}, [\d,]+ tokens, \d+\.\d s, \d+\.\d{5} \$"
    for iteration in (0, 1):
        place = f"iteration {iteration} ({iteration + 1} of 2), "
        expected = ["plan of the next iteration, plan: begins"]
        expected += [f"{place}{phase}: begins" for phase in ("rollout, 2 processes", "train", "conclude")]
        assert said[5 * iteration : 5 * iteration + 4] == expected
        assert re.fullmatch(re.escape(f"{place}conclude: committed: ") + numbers, said[5 * iteration + 4])
    assert len(said) == 10
    first, *rest = done.stdout.split("\n", 1)[1].splitlines()
    assert re.fullmatch(rf"Iteration 1 is committed, with weight version 2: {numbers}\.", first)
    assert rest == [
        f"See all iterations by: gleaner status '{url}'",
        f"Read the responses by: gleaner view '{url}'",
        "To go on, give the same command again.",
    ]


@pytest.mark.slow
def test_a_terminal_gets_no_such_lines_because_it_shows_one_of_its_own(tmp_path):
    file = tmp_path / "told_task.py"
    file.write_text(TASK)
    shown = on_terminal("-W", "ignore", file, PYTHONPATH=str(ROOT))
    assert (shown.code, shown.output) == (0, "1\n")
    assert "train: begins" not in shown.terminal
    piped = subprocess.run(
        [sys.executable, "-W", "ignore", file],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert re.search(rf"^{TIME}run r, iteration 0, train: begins$", piped.stderr, re.MULTILINE)
    assert piped.stdout == "1\n"
