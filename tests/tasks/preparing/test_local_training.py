"""gleaner.train: what is refused before anything starts, and how the end of the process is told."""

import io
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

import gleaner
from examples.run_workflow import workflow_command
from tasks.configuration.run_config import ConfigError
from tasks.preparing import local_training
from tests.small_run import document


@pytest.mark.parametrize("as_file", [False, True])
def test_a_bad_configuration_is_refused_before_anything_starts(tmp_path, as_file):
    config = document(str(tmp_path / "run"), tmp_path / "model", sampling={"temperature": -1})
    if as_file:
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=r"sampling\.temperature: -1 given") as refused:
        gleaner.train(file if as_file else config)
    assert len(refused.value.problems) == 1
    assert not (tmp_path / "run").exists()


def test_no_iteration_is_no_training(tmp_path):
    with pytest.raises(ValueError, match=r"^count: value 0; allowed: 1 or more$"):
        gleaner.train(tmp_path / "none.yaml", 0)
    with pytest.raises(ConfigError, match=r"none\.yaml is not a valid .*\s+cannot be read: No such file"):
        gleaner.train(tmp_path / "none.yaml")


@pytest.mark.slow
def test_what_the_workflow_refuses_is_printed_and_raised(tmp_path, capsys):
    with pytest.raises(gleaner.TrainingFailed, match=r"^training ended with exit status 1; the reason is in what"):
        gleaner.train(document(str(tmp_path / "run"), tmp_path / "no-model"))
    printed = re.sub(r"[\s│]+", "", capsys.readouterr().out)
    assert f"{tmp_path}/no-model" in printed


def test_an_interrupt_ends_the_process_before_it_is_raised(tmp_path, monkeypatch):
    file = tmp_path / "pid"
    program = (
        f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); print(1, flush=True); time.sleep(600)"
    )

    class Interrupted(io.StringIO):
        def write(self, text):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        local_training._follow([sys.executable, "-c", program])
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_the_command_is_that_of_the_guide():
    assert workflow_command(Path("a.yaml"), 3)[3:] == [
        "run",
        str(Path(__file__).parents[3] / "workflows" / "training.py"),
        *("training", "--config", "a.yaml", "--count", "3"),
    ]
    assert Path(workflow_command(Path("a.yaml"), 3)[0]).parent == Path(sys.executable).parent
