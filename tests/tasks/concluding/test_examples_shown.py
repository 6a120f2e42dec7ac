"""What people see of a run on examples: the loss, and no reward."""

import pytest

from storage.clock import ManualClock
from storage.records import layout
from storage.records.run import read_plan, read_report
from tasks.conclude import conclude
from tasks.reporting.export import rollout_tables
from tasks.reporting.run_progress import run_line
from tasks.reporting.watch import OpenIteration
from tasks.train import outcome_of
from tasks.viewing.run_reader import RunReader
from tasks.viewing.run_status import table
from tests.example_runs import URL, chatting_model, config, conversations
from tests.small_run import memory_store, plan_iteration, train_small

OF_REWARDS = {"reward", "reward_std", "frac_reward_zero_std"}


@pytest.fixture
def trained(tmp_path):
    """(store, plan's reference, training record) of an iteration of conversations."""
    store = memory_store("examples")
    run = {"url": URL, "seed": 3, "num_prompts_per_step": 3, "num_generations": 8}
    model = chatting_model(tmp_path / "model")
    reference = plan_iteration(config(model, run=run, data=conversations(tmp_path)))
    return store, reference, train_small(URL, 0)


def test_the_loss_stands_where_a_reward_would(trained):
    store, reference, record = trained
    loss = record.metrics["loss"]
    outcome = outcome_of(reference, record)
    assert (outcome.reward, outcome.measured) == (None, f"loss {loss:.4f}")
    line, *_ = run_line(OpenIteration(store, read_plan(store, 0), ManualClock()).look())
    assert "reward" not in line
    concluded, *_ = conclude(trained=outcome, last=True)
    assert concluded.measured.startswith(f"loss {loss:.4f}, ")
    report = read_report(store, 0)
    assert not (OF_REWARDS | {name for name in report.metrics if name.startswith("turns/")}) & report.metrics.keys()
    assert (report.rewards, len(report.lengths)) == ((), 3)
    titles = [column.header for column in table([report]).columns]
    assert titles[1] == "loss"
    assert "reward" not in titles


def test_pages_show_the_loss_and_the_responses_without_rewards(trained):
    store, reference, record = trained
    conclude(trained=outcome_of(reference, record), last=True)
    page = store.get(layout.deck(0)).decode()
    assert ">Loss</text>" in page
    assert "eward of the responses" not in page
    assert "<td>mean reward</td>" not in page
    assert "Longest" in page
    assert "tokens, stop" in page
    reader = RunReader(store).iteration(0)
    assert reader.index().rewards == [None] * 3
    assert reader.view(0).reward is None
    rows = [table["reward"].to_pylist() for table in rollout_tables(store, read_plan(store, 0), None)]
    assert rows[1:] == [[None] * 3]
