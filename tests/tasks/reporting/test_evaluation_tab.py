"""An evaluation's page and line: what they show, and that they are whole whatever the names are."""

from dataclasses import replace
from html.parser import HTMLParser

from storage.records.evaluation_records import EvaluatedPrompt, EvaluationRecord
from tasks.reporting.evaluation_tab import evaluation_line, evaluation_tab

RECORD = EvaluationRecord(
    weight_version=4,
    digest="ab",
    settings={},
    metrics={
        "val/completions/clipped_ratio": 0.125,
        "val/completions/mean_length": 7.25,
        "val/pass@1": 0.5,
        "val/pass@1/high": 0.75,
        "val/pass@1/low": 0.25,
        "val/reward/mean@2": 0.625,
    },
    prompts=tuple(
        EvaluatedPrompt(prompt_id=f"<p{k}>", graded=3, correct=k % 3, clipped=0, reward=k / 60, length=3.0)
        for k in range(60)
    ),
    created_at_s=1.0,
)


class Balance(HTMLParser):
    """Whether every tag that is opened is closed, in order."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_shows_scores_with_their_intervals_and_the_hardest_prompts():
    tab = evaluation_tab(RECORD, [RECORD])
    assert Balance(tab).open == []
    for shown in ("pass@1", "0.5000", "0.2500", "0.7500", "reward/mean@2", "weight version 4", "completions/mean_len"):
        assert shown.lower() in tab.lower()
    assert "&lt;p0&gt;" in tab
    assert "<p0>" not in tab
    assert "&lt;p49&gt;" in tab
    assert "&lt;p50&gt;" not in tab  # of sixty prompts the fifty with the lowest rewards
    assert "The 50 hardest of 60 prompts" in tab


def test_the_curve_is_of_the_same_settings_only():
    def with_score(version, digest, score):
        return replace(RECORD, weight_version=version, digest=digest, metrics=RECORD.metrics | {"val/pass@1": score})

    alone = evaluation_tab(RECORD, [])
    assert evaluation_tab(RECORD, [RECORD, with_score(2, "cd", 0.1)]) == alone
    assert evaluation_tab(RECORD, [with_score(2, "ab", 0.1), RECORD]) != alone


def test_the_line():
    assert evaluation_line(RECORD) == (
        "weight version 4, evaluation ab of 60 prompts: pass@1 0.500, reward/mean@2 0.625, mean length 7.2, "
        "12.5 % cut at the limit"
    )
