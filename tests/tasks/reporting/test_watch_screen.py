"""What a look becomes on paper of a given width."""

import io
from dataclasses import replace

import pytest

from tasks.reporting.crew_view import MemberView, RunView, Totals, WaitingGroup, WaitingResponse
from tasks.reporting.terminal import Terminal
from tasks.reporting.watch_screen import COLUMNS, screen

TOTALS = Totals(
    responses_planned=64,
    responses_done=40,
    groups_planned=8,
    groups_done=3,
    groups_recorded=2,
    micro_batches=1,
    tokens=12345,
    tokens_per_s=1530.4,
    claims=9,
    moved=4,
)
WORKING = MemberView(
    slot=0,
    joined=False,
    incarnation="00000-0123456789abcdef",
    pool="spot",
    host="node-[red]7",
    state="working",
    heartbeat_age_s=3.2,
    unfinished=11,
    running=8,
    waiting=2,
    tokens_per_s=1530.4,
    tokens_generated=45678,
    tokens_recovered=90,
)


def waiting(group, *responses):
    return WaitingGroup(group=group, unfinished=responses)


def response(number, tokens=0, holder=None, *, released=False):
    return WaitingResponse(response=number, tokens=tokens, holder=holder, released=released)


def lines(view, width=120):
    console = Terminal(file=io.StringIO(), width=width)
    console.print(screen(view, width))
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def a_view(**changes):
    fields = {"run_url": "s3://b/run", "iteration": 3, "phase": "rollout", "phase_seen_s": 75.0, "totals": TOTALS}
    return RunView(**(fields | changes))


def test_the_head_and_the_totals():
    assert lines(a_view(waits_for=(waiting(2, response(16)),)))[:3] == [
        "s3://b/run   iteration 3   rollout, seen for 1 min 15 s",
        "responses 40 of 64   groups 3 of 8   tokens 12,345   1,530 tokens/s",
        "micro-batches recorded 1, with 2 groups   claims 9   responses moved between slots 4",
    ]


def test_what_the_trainer_waits_for():
    groups = (
        waiting(2, response(16, 1200, "00001-0123456789abcdef"), response(19)),
        waiting(5, response(40, 7, "00002-ff00", released=True), *(response(number) for number in range(41, 46))),
    )
    assert lines(a_view(waits_for=groups, groups_behind=3), width=200)[3:] == [
        "the trainer waits for",
        "  group 2: responses 16 (1,200 tokens, held by 00001-0123), 19 (0 tokens, not claimed)",
        "  group 5: responses 40 (7 tokens, released by 00002-ff00), 41 (0 tokens, not claimed), 4 more",
        "  and 3 more groups",
    ]


@pytest.mark.parametrize(
    ("phase", "line"),
    [
        ("training", "all responses are there; the trainer waits for nothing"),
        ("publishing", "the step is taken; its checkpoint, weights and report are being written"),
        ("planning", "the iteration has no plan yet"),
        ("committed", "40 responses, 12,345 tokens; iteration 4 has no plan yet"),
        ("ended", "40 responses, 12,345 tokens; the evaluation is closed"),
        ("no run", "s3://b/run holds no run yet; waiting for one"),
    ],
)
def test_the_other_phases_say_what_comes_next(phase, line):
    assert lines(a_view(phase=phase))[-1] == line


def test_the_crew_is_a_table():
    members = (
        WORKING,
        MemberView(
            slot=1, joined=False, incarnation="00001-aa", pool="spot", host="n", state="silent", unfinished=4, running=4
        ),
        MemberView(slot=2, joined=False, pool="spot", state="not come", unfinished=16),
        MemberView(slot=9, joined=True, incarnation="00009-bb", pool="spot", host="n", state="gone", unfinished=0),
    )
    titles, *rows = lines(a_view(members=members))[-5:]
    assert titles.split() == [column.title for column in COLUMNS]
    assert [" ".join(row.split()) for row in rows] == [
        "0 00000-0123 working 3 s ago 1,530 8/2/11 45,678 90 spot node-[red]7",
        "1 00001-aa silent not yet seen to change 4/0/4 0 0 spot n",
        "2 not come -/-/16 spot",
        "joined 00009-bb gone 0/0/0 0 0 spot n",
    ]


def test_a_store_that_does_not_answer_is_told():
    shown = lines(a_view(notice="no answer within 5 s"))
    assert "this was some time ago; the store does not answer: no answer within 5 s" in shown


def test_a_narrow_terminal_shows_less_of_each_member():
    titles, row = lines(a_view(members=(replace(WORKING, heartbeat_age_s=None),)), width=80)[-2:]
    assert titles.split() == ["slot", "incarnation", "state", "heartbeat", "tokens/s", "run/wait/open"]
    assert " ".join(row.split()) == "0 00000-0123 working not yet seen to change 1,530 8/2/11"


def test_what_is_to_be_expected_has_a_line_of_its_own():
    shown = lines(a_view(totals=replace(TOTALS, reward=0.25, usd_per_h=12.5, to_go_s=95.0)))
    assert "reward so far 0.250   members 12.50 $/h   rollout ends in about 1 min 35 s" in shown
    assert not [line for line in lines(a_view()) if "$/h" in line or "reward" in line or "tools" in line]
    assert "$/h" not in "".join(lines(a_view(totals=replace(TOTALS, usd_per_h=0.0))))
    assert "responses that wait for tools 5" in lines(a_view(totals=replace(TOTALS, acting=5)))


def test_escapes_of_machines_and_stores_are_written_out():
    member = replace(WORKING, host="node\x1b]0;owned\x07", pool="\x9b31m")
    shown = "\n".join(lines(a_view(members=(member,), notice="no\x1b[2Janswer", run_url="s3://b/\x1b[1mrun")))
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)
    for written in (r"node\x1b]0;owned\x07", r"\x9b31m", r"no\x1b[2Janswer", r"s3://b/\x1b[1mrun"):
        assert written in shown
