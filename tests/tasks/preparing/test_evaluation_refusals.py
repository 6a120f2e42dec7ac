"""What an evaluation cannot be made of is refused before anything is created."""

from pathlib import Path

import pytest

from storage.clock import ManualClock
from storage.records.run import read_plan
from storage.stores.connect import connect
from storage.stores.local import LocalStore
from storage.stores.store import ConflictingRecord, StoreDenied
from tasks.grading.reward import GradingError
from tasks.preparing.evaluation import VersionGone
from tasks.preparing.iteration import prepare as plan_training
from tasks.prompts.prompt import PromptError
from tests.evaluated_run import EVALUATION, URL, planned
from tests.small_run import OWN_REWARD, config, everything, memory_store


def refused(store, kind, match, settings, version=1):
    before = everything(store)
    with pytest.raises(kind, match=match):
        planned(settings, version)
    assert everything(store) == before


def evaluated_as(model, **changes):
    return config(URL, model, rewards=OWN_REWARD, evaluation=EVALUATION | changes)


def test_a_run_that_is_not_there(settings):
    store = memory_store("evaluate")
    refused(
        store, ValueError, r"^run\.url: value 'memory://evaluate'; allowed: a run that training has begun$", settings
    )


@pytest.mark.slow
def test_without_the_section_the_prompts_of_training_are_evaluated_and_the_log_says_so(store, model, caplog):
    settings = config(URL, model, rewards=OWN_REWARD)
    reference, slots = planned(settings, 1)
    [doubt] = [line for line in caplog.messages if line.startswith("not sure: evaluation: not given")]
    assert "none is held out" in doubt
    plan = read_plan(connect(reference.run_url), 0)
    assert slots
    assert sum(len(slot.groups) for slot in plan.slots) == settings.data.limit
    assert plan.sampling == settings.sampling.params(plan.sampling.stop_token_ids)


@pytest.mark.parametrize("version", [2, -2])
def test_a_version_that_is_not_there(store, settings, version):
    refused(
        store,
        VersionGone,
        rf"^version: value {version}; memory://evaluate holds the weight versions 0, 1$",
        settings,
        version,
    )


def test_another_runs_configuration(store, model):
    settings = config(URL, model, rewards=OWN_REWARD, evaluation=EVALUATION, run={"seed": 4})
    refused(store, ConflictingRecord, r"run\.seed: 4 here, 3 there", settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"data": {"source": "none.jsonl"}}, PromptError, r"^evaluation\.data\.source: value 'none\.jsonl'; allowed: "),
        (
            {"sampling": {"max_completion_length": 255}},
            PromptError,
            r"^evaluation: prompt '\d+' has \d+ tokens; allowed",
        ),
        (
            {"rewards": [{"function": "tests.reward_functions:needs_a_column"}]},
            GradingError,
            "^evaluation: missing reward column: needs_a_column needs 'difficulty'",
        ),
    ],
)
def test_prompts_and_rewards_that_cannot_be_used(store, model, changes, kind, match):
    settings = evaluated_as(model, **changes)
    refused(store, kind, match, settings)
    fresh = memory_store("evaluate")
    with pytest.raises(kind, match=match):
        plan_training(settings, "e1", ManualClock())
    assert everything(fresh) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "changes", "kind", "match"),
    [
        (None, {"data": {"source": "none.jsonl"}}, PromptError, r"^evaluation\.data\.source: value 'none\.jsonl'"),
        (EVALUATION, {"rewards": [{"function": "tests.reward_functions:needs_a_column"}]}, GradingError, "needs_a_col"),
    ],
)
def test_a_run_under_way_refuses_a_section_that_has_changed(store, model, before, changes, kind, match):
    plan_training(config(URL, model, rewards=OWN_REWARD, evaluation=before), "e1", ManualClock())
    held = everything(store)
    changed = evaluated_as(model, **changes)
    for _ in range(2):  # what is refused does not become what is known
        with pytest.raises(kind, match=match):
            plan_training(changed, "e1", ManualClock())
    assert everything(store) == held


@pytest.mark.slow
def test_a_section_that_was_checked_is_not_opened_again(store, model, tmp_path):
    source = tmp_path / "held_out.jsonl"
    source.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    settings = evaluated_as(model, data={"source": str(source)})
    plan_training(settings, "e1", ManualClock())
    source.unlink()
    assert plan_training(settings, "e1", ManualClock())[1] == [[0, 1]]
    with pytest.raises(PromptError):
        plan_training(evaluated_as(model, data={"source": str(source)}, num_generations=2), "e1", ManualClock())


def test_training_does_not_open_prompts_that_only_the_workflow_evaluates(model):
    memory_store("evaluate")
    settings = evaluated_as(model, data={"source": "none.jsonl"}, interval=0)
    assert plan_training(settings, "e1", ManualClock())[1] == [[0, 1]]


def test_a_directory_that_is_a_link_out_of_the_run(store, model, tmp_path):
    run, victim = LocalStore(tmp_path / "run", fsync=False), tmp_path / "victim"
    for key, body in everything(store).items():
        run.create(key, body)
    settings = config(run.url, model, rewards=OWN_REWARD, evaluation=EVALUATION)
    reference, _ = planned(settings)
    directory = Path(reference.run_url)
    directory.rename(victim)
    next(victim.rglob("plan.json")).unlink()  # which would be planned anew
    directory.symlink_to(victim)
    before = sorted(victim.rglob("*"))
    with pytest.raises(StoreDenied, match="link"):
        planned(settings)
    assert sorted(victim.rglob("*")) == before
