import math
import re
from html.parser import HTMLParser

import pytest

from storage.records.records import ReportRecord, SlotLife
from tasks.reporting.deck import page, render
from tasks.reporting.run_charts import run_charts

METRICS = {
    "reward": 0.625,
    "frac_reward_zero_std": 0.25,
    "completions/mean_length": 50.5,
    "completions/max_length": 256.0,
    "num_tokens": 12345.0,
    "resume/tokens_recovered": 1234.0,
    "resume/tokens_regenerated": 37.0,
    "rollout/prefill_tokens": 1300.0,
    "rollout/prefill_tokens_naive": 5000.0,
    "rollout/prefill_share": 0.26,
    "timing_s/rollout": 21.5,
    "timing_s/train": 12.0,
    "timing_s/iteration": 25.25,
    "cost/usd_iter": 0.0123,
    "cost/usd_rollout": 0.0089,
    "cost/usd_train": 0.0034,
}
LIFE = SlotLife(
    slot=0,
    incarnation="a",
    pool="spot",
    started_at_s=1e9,
    ended_at_s=1e9 + 9,
    state="lost",
    tokens_kept=10,
    tokens_recovered=1234,
    tokens_regenerated=37,
)


def report(iteration: int, metrics: dict[str, float] = METRICS, lives: tuple[SlotLife, ...] = (LIFE,)) -> ReportRecord:
    return ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=0,
        metrics=metrics,
        rewards=(0.0, 1.0) * 64,
        lengths=tuple(range(1, 129)),
        lives=lives,
        train_started_at_s=1e9 + 5,
        train_ended_at_s=1e9 + 20,
        created_at_s=1e9 + 21,
    )


class Rows(HTMLParser):
    """Table rows as lists of cell texts; fails on tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, _attrs: object) -> None:
        self._open.append(tag)
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, _attrs: object) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_tabs_and_what_the_overview_tells():
    tabs = render(report(4), [report(3, METRICS | {"reward": 0.5, "num_tokens": 9999.0})])
    assert list(tabs) == ["Overview", "Learning", "Lengths", "Slots", "Cost"]
    rows = Rows(tabs["Overview"]).rows
    # First what matters.
    assert rows[1:4] == [
        ["mean reward", "0.625", "0.500"],
        ["speed of the rollout", "574 tokens/s", "465 tokens/s"],
        ["cost of the iteration", "$0.0123", "$0.0123"],
    ]
    assert ["tokens generated", "12,345", "9,999"] in rows
    assert ["tokens recovered from the journal", "1,234", "1,234"] in rows
    assert ["tokens generated again", "37", "37"] in rows
    assert ["iteration", "25.2 s", "25.2 s"] in rows
    assert ["cost of the iteration", "$0.0123", "$0.0123"] in rows
    assert ["groups without a learning signal", "25.0 %", "25.0 %"] in rows
    assert ["prefill computed, relative to prefill without sharing", "26.0 %", "26.0 %"] in rows
    assert "1 processes on 1 slots; 1 lost" in tabs["Slots"]
    assert "Prefill: 1,300 tokens computed, of 5,000 without sharing: 26.0 %." in tabs["Slots"]


def test_what_drafts_were_worth_is_told_beside_the_prefill():
    drafts = {"rollout/drafted": 12345.0, "rollout/accepted": 9000.0, "rollout/tokens_per_step": 1.8125}
    told = "Drafts: 12,345 verified, 9,000 accepted. A response got 1.81 tokens from a step."
    for saved, words in (
        ({}, ""),
        ({"rollout/draft_saved_s": 31.25}, " Drafts saved 31.2 s of the members' time."),
        ({"rollout/draft_saved_s": -0.5}, " Drafts cost 0.500 s of the members' time more than they saved."),
    ):
        assert f"<p>{told}{words}</p>" in render(report(4, METRICS | drafts | saved), [])["Slots"]
    for metrics in (METRICS, METRICS | {"rollout/drafted": 0.0, "rollout/accepted": 0.0}):
        assert "Drafts" not in render(report(4, metrics), [])["Slots"]


def test_reward_curve_has_every_iteration_once_in_order():
    history = [report(index, METRICS | {"reward": index / 10}) for index in (5, 0, 4, 1, 2)]
    (points,) = re.findall(r'<polyline points="([^"]*)"', render(report(4), history)["Overview"])
    xs = [float(point.split(",")[0]) for point in points.split()]
    assert len(xs) == 5
    assert xs == sorted(xs)


def test_previous_column_is_the_iteration_before_not_a_later_one():
    later, before, first = (report(index, METRICS | {"reward": index / 100}) for index in (9, 3, 0))
    rows = Rows(render(report(4), [later])["Overview"]).rows
    assert ["mean reward", "0.625", ""] in rows
    rows = Rows(render(report(4), [later, before, first])["Overview"]).rows
    assert ["mean reward", "0.625", "0.0300"] in rows


def test_missing_and_strange_metrics():
    tabs = render(report(0, {"kl": math.nan, "<script>": 1.0}, lives=()), [])
    overview = Rows(tabs["Overview"])
    assert ["KL to the reference", "nan", ""] in overview.rows
    assert ["<script>", "1"] in overview.rows
    assert not any(row and row[0] == "mean reward" for row in overview.rows)
    assert "$" not in tabs["Cost"]
    assert "Prefill" not in tabs["Slots"]


def test_pages_are_self_contained_small_and_well_formed():
    lives = tuple(
        SlotLife(
            slot=slot,
            incarnation=f"rollout-{slot:05d}-{life:03d}-0123456789abcdef",
            pool="spot-h100",
            started_at_s=1e9 + 10 * life,
            ended_at_s=1e9 + 10 * life + 9,
            state="lost",
            tokens_kept=10_000,
            tokens_recovered=9_000,
            tokens_regenerated=100,
        )
        for slot in range(500)
        for life in range(5)
    )
    metrics = METRICS | {f"rewards/function-{index}/mean": 0.5 for index in range(500)}
    history = [report(index, metrics, lives=()) for index in range(3000)]
    for tab in render(report(3000, metrics, lives), history).values():
        assert len(tab.encode()) < 100_000
        assert not Rows(tab).tags & {"script", "link", "img", "iframe", "style"}
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", tab)


def test_the_cost_tab_says_what_dollars_were_for_and_what_a_point_of_reward_has_cost():
    purposes = {"useful": 0.006, "wasted": 0.001, "idle": 0.005, "egress": 0.0003}
    divided = METRICS | {f"cost/usd_{name}": usd for name, usd in purposes.items()}
    page = render(report(4, divided), [report(3, METRICS | {"reward": 0.5})])["Cost"]
    rows = Rows(page).rows
    assert ["useful", "$0.0060", "48.8 %"] in rows
    assert ["egress", "$0.000300", "2.4 %"] in rows
    assert not any(row and row[0] == "starting" for row in rows)
    assert "Since iteration 3, a point of mean reward has cost $0.1968." in page
    assert "point of mean reward" not in render(report(4), [report(3)])["Cost"]


def test_the_bars_of_who_caused_the_dollars_add_up_to_the_iteration():
    parts = {"rollout": 0.004, "train": 0.002, "requests": 0.0005, "egress": 0.0003, "control": 0.0002}
    metrics = {f"cost/usd_{name}": usd for name, usd in parts.items()} | {"cost/usd_iter": sum(parts.values())}
    cost = render(report(0, metrics), [])["Cost"]
    card = cost[cost.index("Who caused the dollars, at listed prices: $0.0070 in all") :].split("</svg>")[0]
    assert [name for name in parts if f">{name}</text>" in card] == list(parts)
    assert ">iteration</text>" not in card


@pytest.mark.parametrize("usd", [{}, {"cost/usd_iter": 0.0, "cost/usd_rollout": 0.0, "cost/usd_per_mtok": 0.0}])
def test_there_are_no_dollars_where_nobody_pays(usd):
    free = {name: value for name, value in METRICS.items() if not name.startswith("cost/")} | usd
    tabs = render(report(4, free), [report(3, free | {"reward": 0.5})])
    assert not re.search(r"\$|[Dd]ollar|usd", "".join(tabs.values()))
    assert "Seconds" in tabs["Cost"]
    # One iteration that cost something is enough.
    paid = render(report(4, free), [report(3, free | {"cost/usd_iter": 0.1})])
    assert "Who caused the dollars" in paid["Cost"]


def test_the_learning_tab_has_what_the_page_draws():
    learned = METRICS | {"actor/grad_norm": 0.4, "mismatch_kl": 0.001, "completions/clipped_ratio": 0.25}
    reports = [report(index, learned) for index in range(3)]
    drawn = run_charts({past.iteration: past.metrics for past in reports}, [], tab="Learning")
    tab = render(reports[-1], reports)["Learning"]
    assert len(drawn) == 4
    assert all(drawing in tab for drawing in drawn)


def test_what_is_not_configured_has_no_row_and_no_bar():
    unused = {"kl": 0.0, "cost/usd_requests": 0.0, "cost/usd_egress": 0.0, "cost/usd_control": 0.0}
    tabs = render(report(0, METRICS | unused), [])
    assert "KL to the reference" not in tabs["Overview"]
    assert not [name for name in ("requests", "egress", "control") if f">{name}</text>" in tabs["Cost"]]
    used = render(report(0, METRICS | dict.fromkeys(unused, 0.001)), [])
    assert "KL to the reference" in used["Overview"]
    assert ">egress</text>" in used["Cost"]


def test_the_page_says_what_the_run_is_and_what_is_on_it():
    facts = {"run": "s3://bucket/<run>", "model": "Qwen", "nothing": ""}
    tabs = render(report(0), [], facts=facts)
    assert "<b>run</b> s3://bucket/&lt;run&gt;; <b>model</b> Qwen" in tabs["Overview"]
    assert "nothing" not in tabs["Overview"]
    document = page("Gleaner, iteration 0", tabs)
    assert re.findall(r'<a href="#([\w-]+)">', document) == re.findall(r'<h2 id="([\w-]+)">', document)
    assert "<script" not in document
    assert "prefers-color-scheme:dark" in document


def test_turns_are_shown_where_there_are_any():
    turns = {
        "turns/mean": 2.5,
        "turns/max": 6.0,
        "turns/calls": 1200.0,
        "turns/calls_invalid": 7.0,
        "turns/calls_unknown": 1.0,
        "turns/tool_seconds": 34.5,
        "turns/failed_share": 0.03125,
    }
    both = [report(number, METRICS | turns) for number in (0, 1)]
    shown = "".join(render(both[1], both).values())
    assert "1,200 calls of tools took 34.5 s." in shown
    assert "Turns by iteration" in shown
    assert "Calls of tools that were not simply answered" in shown
    assert "calls of tools" not in "".join(render(report(1), [report(0), report(1)]).values()).lower()


def test_the_bytes_of_a_version_stand_among_the_figures():
    rows = Rows(render(report(4, METRICS | {"weights/bytes": 1602192.0}), [report(3)])["Overview"]).rows
    assert ["bytes of the published weight version", "1,602,192", ""] in rows
