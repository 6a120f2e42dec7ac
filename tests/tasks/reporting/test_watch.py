"""Looks at an iteration whose journal, claims and heartbeats are written by hand, on a clock moved by hand."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.records import BatchRecord, ClaimRecord, TrainingRecord
from storage.records.run import read_run
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject, ObjectMissing, StoreUnavailable
from tasks.configuration.run_config import dump, parse
from tasks.reporting.watch import Watcher, known_prices
from tests.committed_runs import begin
from tests.journals import Incarnation, a_plan
from tests.watched_run import PLAN, Counted, beat, commit_report, planned, record_batch, steal


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def store():
    return planned()


@pytest.fixture
def watcher(store, clock):
    return Watcher(store, clock)


def test_the_phases_of_an_iteration_and_how_long_each_was_seen(clock):
    store = MemoryStore()
    watcher = Watcher(store, clock)

    def look():
        clock.advance(1.0)
        view = watcher.look()
        return view.iteration, view.phase, view.phase_seen_s

    assert [look(), look()] == [(0, "no run", 0.0), (0, "no run", 1.0)]
    begin(store)
    assert look() == (0, "planning", 0.0)
    records.put(store, layout.plan(0), PLAN)
    assert look() == (0, "rollout", 0.0)
    for slot in (0, 1):
        member = Incarnation(store, PLAN, slot, f"0000{slot}-a")
        assert look()[:2] == (0, "rollout")
        for response in PLAN.responses_of(slot):
            member.write(response, [1, 2, 3])
    assert look() == (0, "training", 0.0)
    record_batch(store, 0, [0, 1, 2, 3])
    assert look() == (0, "training", 1.0)
    training = TrainingRecord(
        iteration=0, weight_version=1, metrics={}, reward_errors=(), started_at_s=0.0, ended_at_s=0.0
    )
    records.put(store, layout.training(0), training)
    assert look() == (0, "publishing", 0.0)
    commit_report(store)
    assert look() == (0, "committed", 0.0)
    records.put(store, layout.plan(1), replace(PLAN, iteration=1, weight_version=1))
    assert look() == (1, "rollout", 0.0)


def test_a_watcher_that_comes_late_finds_the_current_iteration(store, clock):
    commit_report(store)
    view = Watcher(store, clock).look()
    assert (view.iteration, view.phase) == (0, "committed")
    assert (view.totals.responses_done, view.totals.tokens) == (8, 24)
    records.put(store, layout.plan(1), replace(PLAN, iteration=1))
    assert Watcher(store, clock).look().iteration == 1


def test_progress_is_counted_and_what_the_trainer_waits_for_is_named(store, watcher):
    member = Incarnation(store, PLAN, 0, "00000-a")
    member.write(0, [1, 2, 3])
    member.write(1, [1, 2], Finish.RUNNING)
    for response in (4, 5):
        member.write(response, [1])
    view = watcher.look()
    totals = view.totals
    assert (totals.responses_done, totals.groups_done, totals.tokens, totals.claims) == (3, 1, 7, 1)
    first, second, _ = view.waits_for
    assert [(r.response, r.tokens, r.holder) for r in first.unfinished] == [(1, 2, "00000-a")]
    assert [(r.response, r.tokens, r.holder) for r in second.unfinished] == [(2, 0, None), (3, 0, None)]
    assert view.groups_behind == 0
    member.write(1, [4])
    assert [group.group for group in watcher.look().waits_for] == [1, 3]
    assert watcher.look().totals.tokens == 8


def test_a_long_list_of_groups_is_cut(store, clock):
    records.put(store, layout.plan(0), a_plan(groups=9, generations=2, slots=2))
    view = Watcher(store, clock).look()
    assert ([group.group for group in view.waits_for], view.groups_behind) == ([0, 1, 2, 3], 5)


def test_what_the_trainer_recorded_is_done_whatever_the_journal_holds(store, watcher):
    record_batch(store, 0, [2])
    assert watcher.look().totals.groups_recorded == 1
    record_batch(store, 1, [0, 3])
    totals = watcher.look().totals
    assert (totals.micro_batches, totals.groups_recorded, totals.groups_done, totals.tokens) == (2, 3, 3, 18)


def test_a_released_response_is_free_until_somebody_claims_it(store, watcher):
    member = Incarnation(store, PLAN, 0, "00000-a")
    member.write(0, [1, 2], Finish.RELEASED)

    def first():
        return watcher.look().waits_for[0].unfinished[0]

    assert (first().holder, first().released) == ("00000-a", True)
    steal(store, 0, (0,), "00000-a", "00001-a")
    assert (first().holder, first().released, first().tokens) == ("00001-a", False, 2)


def test_an_end_that_was_sealed_off_is_no_end(store, watcher):
    member = Incarnation(store, PLAN, 0, "00000-a")
    member.write(0, [1, 2], Finish.RUNNING)
    member.write(0, [3])
    assert watcher.look().totals.responses_done == 1
    claim = ClaimRecord(unit=0, epoch=2, incarnation="00001-b", slot=1, responses=(0,), sealed={"00000-a": 0})
    records.commit(store, layout.claim(0, 0, 2), claim)
    view = watcher.look()
    assert (view.totals.responses_done, view.totals.tokens) == (0, 2)
    assert view.waits_for[0].unfinished[0].holder == "00001-b"


def test_looks_write_nothing_and_read_nothing_twice(store, watcher):
    dead = Incarnation(store, PLAN, 0, "00000-a")
    for _ in range(3):
        dead.write(0, [1], Finish.RUNNING)
    Incarnation(store, PLAN, 0, "00000-b")
    beat(store, "00000-a", 1)
    beat(store, "00000-b", 1)
    done = Incarnation(store, PLAN, 1, "00001-a")
    for response in PLAN.responses_of(1):
        done.write(response, [1])
    beat(store, "00001-a", 1, state="gone")
    store.written.clear()
    watcher.look()
    store.asked.clear()
    store.listed.clear()
    watcher.look()
    assert store.written == []
    assert store.listed == [layout.claims(0), layout.alive_all(0), layout.FAILURES]
    assert sorted(store.asked) == sorted(
        [
            layout.report(0),
            layout.batch(0, 0),
            layout.shard(0, "00000-b", 0),
            layout.alive(0, "00000-b"),
            layout.alive(0, "00001-a"),
        ]
    )


def test_a_store_that_does_not_answer_is_waited_for(store, clock, watcher):
    looks = watcher.looks(2.0)
    assert next(looks).notice == ""
    store.answers = False
    for _ in range(2):
        view = next(looks)
        assert (view.notice, view.phase, len(view.members)) == ("no answer within 5 s", "rollout", 2)
    store.answers = True
    assert next(looks).notice == ""
    assert clock.monotonic() == 6.0
    store.answers = False
    with pytest.raises(StoreUnavailable):
        next(Watcher(store, clock).looks(2.0))


class DeletedUnderway(Counted):
    """Claims are gone when they are read, as after the commit of an iteration, or by an accident."""

    def __init__(self, *, committed):
        super().__init__()
        self.committed = committed

    def get(self, key, start=0, end=None):
        if key.startswith(layout.claims(0)):
            if self.committed:
                commit_report(self)
            raise ObjectMissing(key)
        return super().get(key, start, end)


@pytest.mark.parametrize("committed", [True, False])
def test_an_iteration_that_is_swept_while_it_is_read(store, clock, committed):
    swept = DeletedUnderway(committed=committed)
    Incarnation(store, PLAN, 0, "00000-a")
    for key in store.list(""):
        swept.put(key, store.get(key))
    watcher = Watcher(swept, clock)
    if committed:
        assert watcher.look().phase == "committed"
    else:
        with pytest.raises(ObjectMissing):
            watcher.look()


def test_a_damaged_shard_is_named(store, watcher):
    Incarnation(store, PLAN, 0, "00000-a").write(0, [1])
    store.put(layout.shard(0, "00000-a", 0), b"?")
    with pytest.raises(CorruptObject, match=layout.shard(0, "00000-a", 0)):
        watcher.look()


def test_nothing_is_waited_for_once_as_many_groups_are_recorded_as_are_wanted(store, clock):
    records.put(store, layout.plan(0), replace(PLAN, groups_wanted=1))
    watcher = Watcher(store, clock)
    record_batch(store, 0, [0])
    batch = records.read(store, BatchRecord, layout.batch(0, 0))
    records.put(store, layout.batch(0, 0), replace(batch, responses=(), filtered=batch.responses))
    view = watcher.look()
    assert (view.phase, view.totals.groups_recorded, [group.group for group in view.waits_for]) == (
        "rollout",
        1,
        [1, 2, 3],
    )
    record_batch(store, 1, [1])
    view = watcher.look()
    assert (view.phase, view.totals.groups_recorded, view.waits_for, view.groups_behind) == ("training", 2, (), 0)


def test_what_a_member_wrote_before_its_good_bye_belongs_to_the_same_look(store, watcher):
    member = Incarnation(store, PLAN, 0, "00000-a")
    beat(store, "00000-a", 1)
    assert watcher.look().totals.tokens == 0
    get = store.get

    def get_late(key, *bounds):
        """The member ends between the look's journal and the look's heartbeats."""
        if key == layout.alive(0, "00000-a") and not store.ended:
            store.ended = True
            for response in PLAN.responses_of(0):
                member.write(response, [1, 2, 3])
            beat(store, "00000-a", 2, state="gone")
        return get(key, *bounds)

    store.ended, store.get = False, get_late
    view = watcher.look()
    assert store.ended
    assert [each.state for each in view.members if each.slot == 0] == ["gone"]
    assert (view.totals.responses_done, view.totals.tokens) == (4, 12)


def test_the_reward_so_far_and_the_time_to_go(store, watcher):
    member = Incarnation(store, PLAN, 0, "00000-a")
    assert (watcher.look().totals.reward, watcher.look().totals.to_go_s) == (None, None)
    for response in PLAN.responses_of(0):
        member.write(response, [1, 2, 3])
    beat(store, "00000-a", 1, tokens_per_s=6.0)
    record_batch(store, 0, [0])
    totals = watcher.look().totals
    assert totals.reward == 0.0
    # Four responses are not begun, and the others have 3 tokens.
    assert totals.to_go_s == pytest.approx(4 * 3 / 6)


def test_what_the_living_members_cost(clock):
    config = {
        "run": {"url": "memory://priced"},
        "policy": {"path": "m"},
        "data": {"source": "arithmetic"},
        "rewards": [{"function": "arithmetic"}],
        "pools": {"rollout": {"count": 2, "usd_per_hour": 1.5}},
    }
    store = MemoryStore()
    begin(store)
    records.put(store, layout.RUN, replace(read_run(store), config=dump(parse(config))))
    records.put(store, layout.plan(0), replace(PLAN, config=dump(parse(config))))
    watcher = Watcher(store, clock)
    assert watcher.look().totals.usd_per_h is None
    beat(store, "00000-a", 1, pool="rollout")
    beat(store, "00001-b", 1, pool="rollout", state="gone")
    beat(store, "00002-c", 1, pool="joined", usd_per_hour=0.25)
    assert watcher.look().totals.usd_per_h == 1.75
    assert known_prices({"pools": {"rollout": {"machine": "nothing"}}}) == {}
