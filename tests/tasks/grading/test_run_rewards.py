"""Reward models from the plan's machine to the trainer's: copied once, compared, fetched, and used in a real run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from resources import user_process
from resources.process import descendants
from storage.clock import ManualClock
from storage.journal.compaction import read_batches
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, ObjectMissing
from tasks.configuration.data import DataConfig
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.run_config import digest
from tasks.grading.grader import check_rewards
from tasks.grading.reward import GradingError
from tasks.grading.run_rewards import content_digests, held_models, open_grader, publish_models
from tasks.preparing.iteration import prepare
from tasks.prompts.loading import load_prompts
from tests.foreign_files import NO_FILE, NO_FOLDER, in_time, is_there_still
from tests.forked import ForkedWorker
from tests.small_run import (
    commit_iteration,
    config,
    everything,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)
from tests.tasks.grading.tiny_reward_model import case, plain_score, save_reward_model

pytestmark = pytest.mark.slow

URL = "memory://rewards"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_reward_model(tmp_path / "judge")


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward models in workers that are forked instead of started, because each would import torch and transformers."""
    monkeypatch.setattr(user_process, "start", ForkedWorker)


def judge(folder: Path, **settings: Any) -> RewardConfig:
    fields = {"function": "reward_model", "name": "judge", "model": str(folder), "time_limit_s": 60.0}
    return RewardConfig(**(fields | settings))


def test_a_model_is_copied_once_and_then_compared(folder: Path, tmp_path: Path):
    store, configs = MemoryStore(), [judge(folder), RewardConfig(function="math")]
    assert held_models(store, configs) == set()
    publish_models(store, configs)
    before = everything(store)
    publish_models(store, configs)
    assert everything(store) == before
    assert held_models(store, configs) == {"judge"}
    held = content_digests(store, configs)
    assert held == content_digests(MemoryStore(), configs)  # of the folder
    assert content_digests(store, configs, "other-") == held
    moved = folder.rename(tmp_path / "moved")
    assert held_models(store, configs) == {"judge"}  # it is nowhere to be compared with, and not needed
    assert content_digests(store, configs) == held
    assert content_digests(store, configs, "other-") == {}
    (moved / "eval_results.json").write_text("{}")
    assert held_models(store, [judge(moved)]) == {"judge"}
    (moved / "config.json").write_text("{}")
    with pytest.raises(ConflictingRecord, match=r"'judge' than '.*moved'; the first file to differ is 'config\.json'"):
        held_models(store, [judge(moved)])


def test_a_grader_is_opened_from_the_run_alone_and_survives_the_death_of_its_model(folder: Path):
    store = MemoryStore()
    publish_models(store, [judge(folder)])
    wanted = [plain_score(folder, f"1+1={text}") for text in ("2", "two", "3")]
    shutil.rmtree(folder)
    cases = [case(number, text) for number, text in enumerate(("2", "two", "3"))]
    with open_grader(store, [judge(folder, weight=2.0)], "cpu") as grader:
        assert [graded.reward for graded in grader.grade(cases)] == pytest.approx([2 * w for w in wanted], abs=1e-5)
        # Stopped, so that it dies in the middle of the next call and of no other.
        process = grader._rewards[0]._worker._process
        [working] = descendants(process.pid)
        os.kill(working, signal.SIGSTOP)
        killer = threading.Timer(0.5, os.kill, (working, signal.SIGKILL))
        killer.start()
        again = grader.grade([*cases, case(9, "1" * 300)])
        killer.join()
        assert process.returncode == -signal.SIGKILL
    assert [graded.values["judge"] for graded in again[:3]] == pytest.approx(wanted, abs=1e-5)
    assert again[3].errors == {"judge": "reward judge of response 9 has 304 tokens for its reward model; allowed: 256"}
    assert again[3].reward == 0.0


@pytest.mark.usefixtures("forked_workers")
def test_a_model_whose_scores_are_no_numbers_ends_grading(folder: Path):
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - imports torch

    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    store = MemoryStore()
    configs = [judge(folder, on_failure=-1.0)]
    publish_models(store, configs)
    error = "the first error: reward judge of response 4 returned nan; allowed: a finite number or None"
    with open_grader(store, configs, "cpu") as grader, pytest.raises(GradingError, match=error):
        grader.grade([case(4, "2")])


@pytest.mark.usefixtures("forked_workers")
def test_weights_that_cannot_be_loaded_end_grading_and_are_no_failure_of_a_response(folder: Path):
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - imports torch

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    store = MemoryStore()
    publish_models(store, [judge(folder)])
    with open_grader(store, [judge(folder)], "cpu") as grader:
        for _ in range(2):
            with pytest.raises(GradingError, match=r"reward 'judge': model: value .* lacks the weights model\.norm\.w"):
                grader.grade([case(0, "2")])


@pytest.mark.usefixtures("forked_workers")
def test_a_model_that_cannot_be_started_again_ends_grading(folder: Path, caplog: pytest.LogCaptureFixture):
    store = MemoryStore()
    publish_models(store, [judge(folder)])
    with open_grader(store, [judge(folder)], "cpu") as grader:
        assert grader.grade([case(0, "2")])[0].errors == {}
        worker = grader._rewards[0]._worker
        weights = Path(worker._settings["folder"]) / "model.safetensors"
        weights.rename(weights.with_suffix(".gone"))
        [working] = descendants(worker._process.pid)
        os.kill(working, signal.SIGKILL)
        with pytest.raises(GradingError, match=r"^reward 'judge': model: value .* holds no \.safetensors file"):
            grader.grade([case(0, "2"), case(1, "3")])
        assert caplog.text.count("trying once more") == 1
        weights.with_suffix(".gone").rename(weights)
        assert grader.grade([case(0, "2")])[0].errors == {}


KILLED = """
import os, signal, tempfile
tempfile.tempdir = {folder!r}
from tasks.grading import run_rewards
with run_rewards._temporary_folder() as root:
    (root / "model.safetensors").write_bytes(bytes(9))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_trainer_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_grader(MemoryStore(), [RewardConfig(function="arithmetic")], "cpu"):
        [alive] = tmp_path.iterdir()
        killed = subprocess.run([sys.executable, "-c", KILLED.format(folder=str(tmp_path))], cwd=ROOT, check=False)
        assert killed.returncode == -signal.SIGKILL
        [left] = list(tmp_path.glob("*/models/model.safetensors"))
        assert alive not in left.parents
        with open_grader(MemoryStore(), [RewardConfig(function="arithmetic")], "cpu"):
            assert not left.exists()
            assert alive.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", NO_FOLDER)
def test_what_another_user_has_put_in_the_place_of_an_abandoned_folder_stays_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "gleaner-rewards-x"
    NO_FOLDER[what](folder)
    if folder.is_dir():
        # Such as a file of this user that another has a link to.
        (folder / "owner").touch(0o600)
    in_time(_open_and_close)
    assert is_there_still(folder)
    assert not folder.is_dir() or is_there_still(folder / "owner")


@pytest.mark.parametrize("what", NO_FILE)
def test_what_is_no_lock_of_ones_own_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "gleaner-rewards-x"
    folder.mkdir(mode=0o700)
    NO_FILE[what](folder / "owner")
    in_time(_open_and_close)
    assert is_there_still(folder / "owner")


def _open_and_close() -> None:
    with open_grader(MemoryStore(), [RewardConfig(function="arithmetic")], "cpu"):
        pass


def prompt_file(path: Path, prompts: list[Any]) -> DataConfig:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return DataConfig(source=str(path))


@pytest.mark.usefixtures("forked_workers")
def test_a_few_prompts_are_put_into_the_models_tokens_before_the_run(tmp_path: Path):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    folder = save_reward_model(tmp_path / "judge", template=template)
    user, system = {"role": "user", "content": "1"}, {"role": "system", "content": "2"}
    fine = load_prompts(prompt_file(tmp_path / "fine.jsonl", [[user]] * 3))
    check_rewards([judge(folder)], fine.columns, prompts=fine)
    last = load_prompts(prompt_file(tmp_path / "last.jsonl", [[user]] * 30 + [[system, user]]))
    with pytest.raises(GradingError, match=r"^reward 'judge': the prompt \[.*'x' cannot be put into .*no system role$"):
        check_rewards([judge(folder)], last.columns, prompts=last)
    check_rewards([judge(folder)], last.columns, {"judge"}, last)
    long = load_prompts(prompt_file(tmp_path / "long.jsonl", ["1" * 256]))
    with pytest.raises(GradingError, match=r"with the answer 'x' has 257 tokens for its reward model; allowed: 256"):
        check_rewards([judge(folder)], long.columns, prompts=long)


def test_a_model_that_the_run_does_not_hold_is_missed(folder: Path):
    with pytest.raises(ObjectMissing), open_grader(MemoryStore(), [judge(folder)], "cpu"):
        pass


def several(folder: Path) -> list[dict[str, Any]]:
    return [
        {"function": "reward_model", "name": "judge", "model": str(folder), "time_limit_s": 60.0, "weight": 0.5},
        {"function": "format", "arguments": {"pattern": r"\d.*"}},
        {"function": "length", "arguments": {"free_tokens": 2, "scale_tokens": 50}, "weight": 2.0},
        {"function": "tests.reward_functions:only_even_length", "name": "even"},
    ]


@pytest.mark.usefixtures("forked_workers")
def test_a_run_of_several_weighted_rewards_end_to_end(folder: Path, tmp_path: Path):
    store = memory_store("rewards")
    settings = config(URL, model_directory(tmp_path / "policy"), rewards=several(folder))
    plan_iteration(settings)
    assert store.list(layout.reward_model("judge")) == [layout.reward_model("judge")]
    shutil.rmtree(folder)
    roll_out(URL, 0)
    train_small(URL, 0)
    graded = [response for batch in read_batches(store, 0) for response in batch.responses]
    assert len(graded) == 12
    for response in graded:
        judged, form, length, even = (response.rewards[name] for name in ("judge", "format", "length", "even"))
        assert length == max(-1.0, -max(0, response.length - 2) / 50)
        assert form in (0.0, 1.0)
        assert even == (1.0 if response.length % 2 == 0 else None)
        assert response.reward == pytest.approx(0.5 * judged + form + 2.0 * length + (even or 0.0))
    assert len({response.rewards["judge"] for response in graded}) > 6
    metrics = commit_iteration(URL, 0).metrics
    judged = [response.rewards["judge"] for response in graded]
    mean = sum(judged) / 12
    assert metrics["rewards/judge/mean"] == pytest.approx(mean)
    assert metrics["rewards/judge/std"] == pytest.approx((sum((value - mean) ** 2 for value in judged) / 11) ** 0.5)
    assert metrics["reward_errors"] == 0
    assert {f"rewards/{name}/{kind}" for name in ("format", "length") for kind in ("mean", "std")} <= metrics.keys()
    # The next iteration finds the model in the run.
    plan_iteration(settings)
    roll_out(URL, 1)
    train_small(URL, 1)


@pytest.mark.usefixtures("forked_workers")
def test_another_model_under_the_name_of_a_runs_own_is_refused(folder: Path, tmp_path: Path):
    store = memory_store("rewards")
    policy = model_directory(tmp_path / "policy")
    settings = config(URL, policy, rewards=several(folder))
    plan_iteration(settings)
    before = everything(store)
    other = save_reward_model(tmp_path / "other", num_hidden_layers=1)
    changed = config(URL, policy, rewards=several(other))
    assert digest(changed) == digest(settings)  # a path is not what is learned; what lies there is
    with pytest.raises(
        ConflictingRecord, match=r"holds another reward model as 'judge' than '.*other'; the first file"
    ):
        prepare(changed, "test", ManualClock())
    assert everything(store) == before
    patient = [reward | {"time_limit_s": 61.0} for reward in several(folder)]
    assert digest(config(URL, policy, rewards=patient)) == digest(settings)
    shorter = [
        *several(folder)[:2],
        several(folder)[2] | {"arguments": {"free_tokens": 3, "scale_tokens": 50}},
        several(folder)[3],
    ]
    assert digest(config(URL, policy, rewards=shorter)) != digest(settings)
