"""A run whose first responses hardly ever end says so: in the log, the Deck and `gleaner status`, whoever concludes."""

import logging
from dataclasses import replace

import pytest
from click.testing import CliRunner

from storage.records.records import ReportRecord
from storage.records.run import read_report
from storage.stores.connect import connect
from tasks.concluding.iteration import commit_and_report
from tasks.reporting.conclusion import cut_line
from tasks.viewing.reading_commands import status
from tests.small_run import config, plan_iteration, roll_out, train_small

REPORT = ReportRecord(
    iteration=0,
    weight_version=1,
    next_prompt=0,
    metrics={},
    rewards=(),
    lengths=(),
    lives=(),
    train_started_at_s=0,
    train_ended_at_s=0,
    created_at_s=0,
)


@pytest.mark.parametrize(
    ("iteration", "share", "tells"),
    [(0, 0.951, True), (0, 1.0, True), (0, 0.95, False), (0, 0.0, False), (1, 1.0, False)],
)
def test_it_is_told_of_the_first_iteration_above_95_percent(iteration, share, tells):
    line = cut_line(replace(REPORT, iteration=iteration, metrics={"completions/clipped_ratio": share}))
    assert (line is not None) == tells
    assert line is None or line.startswith(f"iteration 0: {100 * share:.1f} % of the responses were cut at the length")


def test_a_report_of_another_program_without_the_share_tells_nothing():
    assert cut_line(REPORT) is None


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "share"), [(1, 1.0), (40, None)])
def test_log_deck_and_status_say_it_and_so_does_whoever_concludes_again(model, tmp_path, caplog, limit, share):
    url = str(tmp_path / "run")
    settings = config(url, model, sampling={"max_completion_length": limit}, algorithm={"overlong_buffer_length": None})
    reference = plan_iteration(settings)
    roll_out(url, 0)
    train_small(url, 0)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            _, tabs = commit_and_report(reference, last=False)
        line = cut_line(read_report(connect(url), 0))
        assert (line is not None) == (share is not None)
        shown = CliRunner().invoke(status, [url]).output
        for where in (caplog.text, tabs["Overview"], shown):
            assert ("cut at the length limit" in where.replace("responses cut at the length limit", "")) == bool(share)
        if line is not None:
            assert line in caplog.text
            assert line in shown
