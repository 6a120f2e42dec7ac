"""`pyflyte run` whole, with real processes, where slots of the crew fail for good or never start."""

import time
from pathlib import Path

import pytest
import yaml

from examples.compare import undisturbed_equals
from examples.warm_start import build_model, build_tokenizer
from storage import layout, records
from storage.connect import connect
from storage.crew_records import failures
from storage.records import SettingsRecord
from storage.run import read_plan, reports
from tests.workflows.test_training import config_file, pyflyte

pytestmark = pytest.mark.slow

# Python imports this at every start: elements of the map with these numbers die before their first line.
DYING = """
import os, signal
if os.environ.get("FLYTE_K8S_ARRAY_INDEX", "") in os.environ["SLOTS_THAT_DIE"].split(","):
    os.kill(os.getpid(), signal.SIGKILL)
"""
WAITS_MAX_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    build_model(len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def slots_die(tmp_path, monkeypatch):
    """Have processes of these slots die at every start."""

    def die(*slots):
        (tmp_path / "dying").mkdir()
        (tmp_path / "dying" / "sitecustomize.py").write_text(DYING)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "dying"))
        monkeypatch.setenv("SLOTS_THAT_DIE", ",".join(map(str, slots)))

    return die


def configured(folder: Path, model: Path, **sections) -> tuple[Path, str]:
    url = str(folder / "run")
    file = config_file(folder, model, url)
    document = yaml.safe_load(file.read_text())
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values
    document["trainer"]["group_timeout_s"] = 3600
    file.write_text(yaml.safe_dump(document))
    return file, url


def lived(file: Path, *more: str) -> tuple[int, str]:
    child = pyflyte(file, *more)
    output, _ = child.communicate(timeout=600)
    return child.returncode, " ".join(output.replace("│", " ").split())


def test_a_slot_that_is_killed_at_every_attempt_leaves_its_responses_to_the_other(tmp_path, model, slots_die):
    slots_die(1)
    file, url = configured(tmp_path, model)
    code, output = lived(file)
    assert code == 0, output
    assert "no attempts left; last: exit code -9" in output
    [report] = reports(connect(url))
    assert {life.slot for life in report.lives if life.tokens_kept} == {0}
    assert undisturbed_equals(url, 0)[:2] == (32, 32)


def test_where_every_slot_fails_the_run_ends_soon_and_says_why(tmp_path, model):
    """Not after group_timeout_s, which is an hour: an image without the engine is known at once."""
    file, url = configured(tmp_path, model, rollout={"engine": "vllm"})
    code, output = lived(file)
    ended_at_s = time.time()
    assert code == 1
    store = connect(url)
    execution = records.read(store, SettingsRecord, layout.settings(0)).execution
    told = failures(store, 0, execution)
    assert [failure.slot for failure in told] == [0, 1]
    assert ended_at_s - max(failure.at_s for failure in told) < WAITS_MAX_S
    assert "no process can generate the missing responses" in output
    for failure in told:
        assert "vLLM" in failure.error
        assert f"slot {failure.slot}: {failure.error[:40]}" in output


def test_where_no_rollout_process_ever_starts_the_trainer_generates_and_learns_the_same(tmp_path, model, slots_die):
    (tmp_path / "alone").mkdir()
    (tmp_path / "undisturbed").mkdir()
    file, undisturbed = configured(tmp_path / "undisturbed", model)
    code, output = lived(file)
    assert code == 0, output
    slots_die(0, 1)
    planning = {"seeding": "auto", "seeding_s_initial": 0.0, "seeding_s_min": 0.0}
    file, alone = configured(tmp_path / "alone", model, planning=planning)
    code, output = lived(file)
    assert code == 0, output
    assert not read_plan(connect(alone), 0).slots[-1].groups or read_plan(connect(alone), 0).slots[-1].pool != "train"
    [with_crew], [without] = reports(connect(undisturbed)), reports(connect(alone))
    assert {life.pool for life in without.lives} == {"train"}
    assert without.rewards == with_crew.rewards
    assert without.lengths == with_crew.lengths
    assert without.metrics["seeding/tokens"] == without.metrics["num_tokens"]
    assert undisturbed_equals(alone, 0)[:2] == (32, 32)
