"""Evaluations under Flyte 2: alone, and beside training, which goes on where an evaluation fails; and their reports."""

from pathlib import Path

import pytest
import yaml
from flyte.errors import RuntimeUserError

from storage.records.evaluations import evaluations
from storage.records.failures import last_failures
from storage.records.run import next_iteration
from storage.stores.connect import connect
from tests.flyte2_runs import local_run, run_local
from tests.whole_runs import ONE_SLOT, config_file
from workflows_flyte2.evaluating import evaluation
from workflows_flyte2.training import training

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
EVALUATION = {
    "data": {"source": "arithmetic", "limit": 8, "seed": 99},
    "num_generations": 4,
    "sampling": {"max_completion_length": 40},
    "interval": 1,
}


def test_training_evaluates_beside_and_its_reports_have_the_tabs_of_the_decks(tmp_path, model):
    url = str(tmp_path / "run")
    sections = {"rollout": {"engine": "scripted"}, "pools": ONE_SLOT, "evaluation": EVALUATION}
    file = config_file(tmp_path, model, url, **sections)
    run = local_run(training, yaml.safe_load(file.read_text()), count=1)
    store = connect(url)
    assert [record.weight_version for record in evaluations(store)] == [0, 1]
    pages = [page.read_text() for page in Path(run.url).rglob("report.html")]
    assert sum("Evaluation</li>" in page for page in pages) == 2
    assert sum("<svg" in page and "Evaluation</li>" not in page for page in pages) == 1

    outcome = run_local(evaluation, file)
    assert (outcome.weight_version, outcome.metrics) == (1, evaluations(store)[1].metrics)


def test_an_evaluation_that_fails_ends_the_execution_after_training(tmp_path, model):
    url = str(tmp_path / "run")
    stops = [{"function": "tests.reward_functions:no_multiples_of_three", "on_failure": "stop"}]
    broken = EVALUATION | {"rewards": stops}
    file = config_file(tmp_path, model, url, rollout={"engine": "scripted"}, pools=ONE_SLOT, evaluation=broken)
    with pytest.raises(RuntimeUserError, match="training is done up to iteration 0, and 2 of 2 evaluations failed"):
        run_local(training, file, count=1)
    store = connect(url)
    assert (next_iteration(store), evaluations(store)) == (1, [])
    [failure] = last_failures(store, 1)
    assert failure.task == "evaluation"
