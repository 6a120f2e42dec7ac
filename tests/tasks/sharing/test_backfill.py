"""When a member generates on a host, for which run, and that it has left before a phase begins."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.run import read_plan
from storage.stores.memory import MemoryStore
from tasks.sharing.backfill import choose_backfill, unfinished_tokens
from tasks.sharing.billing import bill, total_s
from tasks.sharing.host_settings import HostSettings
from tasks.sharing.state_cache import Need
from tests.fleet_records import a_run
from tests.host_stage import Stage
from tests.small_run import config, document, memory_store, model_directory, plan_iteration, roll_out

A, B = (a_run(name, cycle_s=100.0) for name in "ab")
NEEDS = [Need(A, 50.0), Need(B, 80.0)]
LEAVE_S = 2.0


class ScriptedMember:
    """Leaves LEAVE_S after a notice unless it is stubborn; breaks: seconds after which it ends by itself."""

    def __init__(self, stage, breaks=None, stubborn=False):
        self.stage, self.breaks, self.stubborn = stage, breaks, stubborn
        self.started, self.noticed, self.killed = [], [], []
        self.ends_s = None

    @property
    def now_s(self):
        return self.stage.clock.monotonic() - 500.0

    @property
    def is_running(self):
        return self.ends_s is not None and self.now_s < self.ends_s

    def start(self, run_url):
        assert not self.is_running
        assert not any(self.stage.workers.state(run).has_device for run in self.stage.workers.at)
        self.started.append((run_url[-1], self.now_s))
        self.ends_s = 1e9 if self.breaks is None else self.now_s + self.breaks

    def notice(self):
        self.noticed.append(self.now_s)
        if not self.stubborn:
            self.ends_s = self.now_s + LEAVE_S

    def kill(self):
        self.killed.append(self.now_s)
        self.ends_s = None


@pytest.fixture
def stage():
    return Stage(MemoryStore("true"))


def play(stage, until_s, member, tokens, **settings):
    begin = stage.workers.begin

    def begin_alone(*arguments, **named):
        assert not member.is_running, "a phase begins while a member has the device"
        begin(*arguments, **named)

    stage.workers.begin = begin_alone
    unfinished = lambda store, _: tokens[store.url[-1]]  # noqa: E731
    return stage.play(until_s, member=member, unfinished=unfinished, **settings)


def test_the_run_with_most_unfinished_tokens_is_helped_while_no_phase_is_expected():
    assert choose_backfill(NEEDS, {A.id: 5.0, B.id: 7.0}, 0.0, 50.0) == B.id
    assert choose_backfill(NEEDS, {A.id: 7.0, B.id: 7.0}, 0.0, 50.0) == min(A.id, B.id)
    assert choose_backfill(NEEDS, {A.id: 5.0, B.id: 7.0}, 1.0, 50.0) is None
    assert choose_backfill(NEEDS, {A.id: 0.0, B.id: 0.0}, 0.0, 50.0) is None
    assert choose_backfill([], {}, 0.0, 50.0) is None


def test_without_the_setting_no_member_is_started(stage):
    stage.admit(A, B)
    member = ScriptedMember(stage)
    play(stage, 60, member, {"a": 5.0, "b": 7.0})
    assert member.started == []
    with pytest.raises(ValueError, match=r"backfill_s: value 0; allowed: above 0"):
        HostSettings(backfill_s=0)


def test_a_phase_that_becomes_due_gives_notice_and_begins_when_the_member_has_left(stage):
    stage.admit(A, B)
    stage.due(A, 0, at_s=30)
    member = ScriptedMember(stage)
    assert play(stage, 60, member, {"a": 5.0, "b": 7.0}, backfill_s=20.0) == [("a", 0)]
    [(helped, at_s), *_] = member.started
    assert helped == "b"
    assert at_s < 10
    assert 30 <= member.noticed[0] <= 32
    assert stage.workers.begun[0][2] >= member.noticed[0] + LEAVE_S
    assert member.killed == []
    # At the end of the host it has left, too.
    assert not member.is_running
    assert len(member.noticed) == len(member.started)


def test_its_seconds_are_billed_once_to_the_run_that_it_helps(stage):
    stage.admit(A, B)
    stage.due(A, 0, at_s=30)
    member = ScriptedMember(stage)
    play(stage, 60, member, {"a": 5.0, "b": 7.0}, backfill_s=20.0, spent_interval_s=7.0)
    billed = bill(stage.spent, stage.beat.lived_s, {A.id: 1.0, B.id: 1.0})
    assert total_s(billed) == pytest.approx(stage.beat.lived_s, abs=1e-9)
    assert "backfill" not in billed[A.id]
    first_s = member.noticed[0] + LEAVE_S - member.started[0][1]
    assert billed[B.id]["backfill"] >= first_s
    helped_s = sum(ended + LEAVE_S - at_s for (_, at_s), ended in zip(member.started, member.noticed, strict=True))
    assert billed[B.id]["backfill"] == pytest.approx(helped_s, abs=1.0 * len(member.started))


def test_a_member_that_does_not_leave_is_killed(stage):
    stage.admit(A, B)
    stage.due(A, 0, at_s=30)
    member = ScriptedMember(stage, stubborn=True)
    assert play(stage, 120, member, {"a": 5.0, "b": 7.0}, backfill_s=20.0, notice_s=15.0) == [("a", 0)]
    assert 45 <= member.killed[0] <= 48


def test_a_member_that_ends_by_itself_is_not_started_again_at_once(stage):
    stage.admit(A, B)
    member = ScriptedMember(stage, breaks=2.0)
    play(stage, 100, member, {"a": 5.0, "b": 7.0}, backfill_s=5.0)
    assert len(member.started) == 1


def test_no_member_is_started_for_nothing_and_what_is_unfinished_is_asked_rarely(stage):
    asked = []

    class Counted(dict):
        def __getitem__(self, name):
            asked.append(name)
            return 0.0

    stage.admit(A, B)
    member = ScriptedMember(stage)
    play(stage, 90, member, Counted(), backfill_s=20.0)
    assert member.started == []
    assert 2 <= len(asked) <= 2 * 5


def test_unfinished_tokens_fall_as_members_finish_and_are_none_after_closing(tmp_path):
    model, url = model_directory(tmp_path), "memory://unfinished"
    store = memory_store("unfinished")
    assert unfinished_tokens(store, 0) == 0.0
    settings = config(url, model)
    longest = document(url, model)["sampling"]["max_completion_length"]
    plan_iteration(settings, ManualClock())
    assert unfinished_tokens(store, 0) == 12 * longest
    roll_out(url, 0)
    assert unfinished_tokens(store, 0) == 0.0
    for key in store.list(layout.alive_all(0)):
        store.put(key, b"garbage")
    assert unfinished_tokens(store, 0) == 12 * longest
    planned = read_plan(store, 0)
    with_turns = {**planned.config, "turns": {"tools": ["mine:search"]}}
    records.put(store, layout.plan(0), replace(planned, config=with_turns))
    assert unfinished_tokens(store, 0) == 0.0  # a host runs none of its functions
    records.put(store, layout.plan(0), planned)
    store.put(layout.closed(0), b"closed")
    assert unfinished_tokens(store, 0) == 0.0
