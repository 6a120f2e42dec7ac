"""Simulated histories of fleets: none breaks a rule, each is a function of its seed, and bugs put in are found."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle, islice

import pytest

from simulation.judge_fleet import live_and_judge_fleet
from simulation.simulated_fleet_history import FleetHistory, FleetStrike, draw_fleet_history
from simulation.simulated_workers import SimulatedWorkers
from storage.fleet.fleet_records import DueRecord
from storage.journal import liveness
from storage.records import records
from tasks.sharing import backfill, billing, host, phase_poller, residents, seating, spending, state_cache

pytestmark = pytest.mark.slow

# More than the rarest of the planted bugs needs.
DEFAULT_SEEDS = range(3000)
DIGEST = (
    "import hashlib, logging; logging.disable(); from benchmarks.sharing_histories import *; "
    "outcomes = [live_and_judge_fleet(draw_fleet_history(seed)) for seed in range(8)]; "
    "print([hashlib.md5(repr(each.events).encode()).hexdigest() for each in outcomes])"
)


def drawn(wanted: Callable[[FleetHistory], bool] = lambda _: True) -> Iterator[FleetHistory]:
    return (history for history in map(draw_fleet_history, DEFAULT_SEEDS) if wanted(history))


def breaks(rule: str, histories: Iterable[FleetHistory]) -> bool:
    """Whether one of the histories breaks the rule; those left when that is known are not lived."""
    return any(
        found.split(":", 1)[0] == rule for history in histories for found in live_and_judge_fleet(history).broken
    )


def is_found(rule: str, wanted: Callable[[FleetHistory], bool] = lambda _: True) -> bool:
    """Whether one of the default histories that have what is wanted breaks the rule."""
    return breaks(rule, drawn(wanted))


def shares_a_fleet(history):
    """Whether several hosts are there from the beginning."""
    return sum(host.arrives_at_s < 30 for host in history.hosts) > 1


def struck_often(*kinds, gap_s):
    """Histories of several hosts, struck in these ways in turn, every `gap_s` until the calm.

    What the bug needs is rare in the drawn strikes, and comes in nearly every history that has nothing else.
    """
    for history in drawn(shares_a_fleet):
        moments_s = range(5, int(history.calm_at_s), gap_s)
        duration_s = 3 * history.host_ttl_s
        yield replace(
            history,
            strikes=tuple(
                FleetStrike(at_s=at_s, kind=kind, duration_s=duration_s)
                for at_s, kind in zip(moments_s, cycle(kinds), strict=False)
            ),
        )


@pytest.mark.parametrize(
    "histories", [struck_often("clock", gap_s=40), struck_often("freeze", "suspend", gap_s=40)], ids=["clock", "frozen"]
)
def test_a_history_struck_often_breaks_no_rule_either(histories):
    """So what the tests below find in them is the bug."""
    assert [live_and_judge_fleet(history).broken for history in islice(histories, 3)] == [[]] * 3


@pytest.fixture(scope="module")
def outcomes():
    return [live_and_judge_fleet(draw_fleet_history(seed)) for seed in range(40)]


def test_no_history_breaks_a_rule(outcomes):
    assert {seed: outcome.broken for seed, outcome in enumerate(outcomes) if outcome.broken} == {}


def test_the_histories_are_eventful(outcomes):
    """A simulator in which nothing goes wrong shows nothing."""
    counts = sum((outcome.counts for outcome in outcomes), Counter())
    assert counts["idle times compared with seats"] > 100
    for kind in (
        "kill",
        "freeze",
        "suspend",
        "clock",
        "heartbeat",
        "outage",
        "denied",
        "worker",
        "run away",
        "told",
    ):
        assert counts[f"strike: {kind}"] > 0, kind
    for fault in ("throttled", "request_lost", "request_late", "answer_lost", "answer_retried", "denied"):
        assert counts[f"fault: {fault}"] > 5, fault
    for what in ("members started", "seats taken over", "resident states used", "states from the object store, ahead"):
        assert counts[what] > 20, what
    assert counts["records of tiers compared"] > 5
    assert counts["repeats"] > 0
    assert counts["phases replayed"] > 0
    assert 0.1 < max(outcome.requests_to_bound for outcome in outcomes) < 1


def test_a_history_is_a_function_of_its_seed_and_not_of_the_process():
    def digests(hash_seed):
        command = [sys.executable, "-c", DIGEST]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert digests("1") == digests("2") != ""


class WallClock:
    """A bug: silence by the time of day."""

    def __init__(self, clock):
        self.monotonic = clock.wall


def test_a_ttl_by_the_wall_clock_is_found(monkeypatch):
    def by_wall_clock(store, kind, key, clock, **others):
        return liveness.Heartbeats(store, kind, key, WallClock(clock), **others)

    monkeypatch.setattr(seating, "Heartbeats", by_wall_clock)
    assert breaks("hasty", struck_often("clock", gap_s=40))


def test_a_resident_state_that_is_used_without_comparing_digests_is_found(monkeypatch):
    monkeypatch.setattr(residents, "is_usable", lambda digest, _: digest is not None)
    assert breaks("resident", struck_often("freeze", "suspend", gap_s=40))


def test_a_seat_that_is_overwritten_is_found(monkeypatch):
    commit = records.commit

    def overwrite(store, key, record):
        return (records.put(store, key, record) or True) if "/seats/" in key else commit(store, key, record)

    monkeypatch.setattr(records, "commit", overwrite)
    assert is_found("doubled")


def test_a_phase_that_begins_before_it_is_due_is_found(monkeypatch):
    monkeypatch.setattr(phase_poller, "read_due", lambda _, iteration: DueRecord(iteration=iteration, groups=1))
    assert is_found("early")


def test_idle_time_that_is_billed_twice_is_found(monkeypatch):
    payers = billing.payers

    def whole_to_each(run, seated, shares):
        return [(each, 1.0) for each, _ in payers(run, seated, shares)]

    monkeypatch.setattr(billing, "payers", whole_to_each)
    assert is_found("bill", lambda history: len(history.runs) > 1)


def test_a_run_that_pays_for_idle_time_is_found(monkeypatch):
    note = spending.Spending.note

    def never_idle(self, kind, run, iteration, now_s):
        if kind != "idle":
            note(self, kind, run, iteration, now_s)

    monkeypatch.setattr(spending.Spending, "note", never_idle)
    assert is_found("bill", lambda history: history.weather == history.calm and not history.strikes)


def test_states_that_are_never_dropped_are_found(monkeypatch):
    monkeypatch.setattr(state_cache, "make_room", lambda *_, **__: ())
    assert is_found("memory")


def test_a_state_that_is_read_ahead_onto_the_device_is_found(monkeypatch):
    def onto_the_device(self, run, iteration):
        self.begin(run, iteration)

    monkeypatch.setattr(SimulatedWorkers, "prefetch", onto_the_device)
    assert is_found("doubled", lambda history: len(history.runs) > 1)


def test_a_tier_that_is_not_recorded_is_found(monkeypatch):
    monkeypatch.setattr(spending.Spending, "note_restored", lambda *_: None)
    assert is_found("tiers", lambda history: history.weather == history.calm and not history.strikes)


def test_a_host_that_never_takes_the_seats_of_the_dead_is_found(monkeypatch):
    def by_its_word(sign, _ttl_s):
        return sign.record is not None and sign.record.state == "gone"

    monkeypatch.setattr(liveness.SeenHeartbeat, "lost", by_its_word)
    monkeypatch.setattr(seating, "FORGOTTEN_TTLS", 1e9)
    assert is_found("livelock", lambda history: any(strike.kind == "kill" for strike in history.strikes))


def helps(history):
    return any(host.backfill_s is not None for host in history.hosts)


def test_a_phase_that_begins_before_the_member_has_left_is_found(monkeypatch):
    def forget(self, _now_s):
        self.run = None

    monkeypatch.setattr(backfill.Backfill, "leave", forget)
    assert is_found("doubled", helps)


def test_a_member_that_is_not_billed_to_the_run_that_it_helps_is_found(monkeypatch):
    note = spending.Spending.note

    def idle_instead(self, kind, run, iteration, now_s):
        note(self, "idle", None, None, now_s) if kind == "backfill" else note(self, kind, run, iteration, now_s)

    monkeypatch.setattr(spending.Spending, "note", idle_instead)
    assert is_found("bill", lambda history: helps(history) and not history.strikes)


def is_calm(history):
    """Whether nothing goes wrong, so that hosts notice everything soon."""
    return history.weather == history.calm and not (history.strikes or history.crashes or history.hangs)


def test_idle_time_that_is_billed_to_those_who_were_seated_afterwards_is_found(monkeypatch):
    record = spending.Spending.record

    def once_a_minute(self, seated, now_s):
        began_s = self._entries[0].began_s if self._entries else self._since_s
        if now_s - began_s >= 60.0:
            record(self, seated, now_s)

    monkeypatch.setattr(spending.Spending, "record", once_a_minute)
    assert is_found("payer")


def test_idle_time_that_is_not_billed_to_one_who_was_seated_is_found(monkeypatch):
    record = spending.Spending.record
    monkeypatch.setattr(
        spending.Spending, "record", lambda self, seated, now_s: record(self, sorted(seated)[:1], now_s)
    )
    assert is_found("payer", lambda history: is_calm(history) and len(history.runs) > 1)


def test_idle_time_that_is_divided_without_regard_to_shares_is_found(monkeypatch):
    payers = billing.payers
    monkeypatch.setattr(billing, "payers", lambda run, seated, _: payers(run, seated, {}))
    assert is_found("payer", lambda history: len(history.runs) > 1)


@pytest.mark.parametrize("of", ["kind", "iteration"])
def test_time_that_is_billed_as_what_it_was_not_is_found(monkeypatch, of):
    note = spending.Spending.note

    def confuse(self, kind, run, iteration, now_s):
        if of == "kind":
            kind = {"train": "switch"}.get(kind, kind)
        elif iteration is not None:
            iteration += 1
        note(self, kind, run, iteration, now_s)

    monkeypatch.setattr(spending.Spending, "note", confuse)
    assert is_found("bill", is_calm)


def test_a_phase_that_begins_without_asking_for_its_seat_is_found(monkeypatch):
    monkeypatch.setattr(seating.Seating, "is_mine", lambda *_: True)
    assert is_found("seat")


def test_a_host_that_begins_phases_after_its_hours_is_found(monkeypatch):
    monkeypatch.setattr(host, "SECONDS_PER_HOUR", 1e6)
    assert is_found("stay", lambda history: is_calm(history) and any(each.stays_s for each in history.hosts))


def test_a_host_that_ends_without_a_word_is_found(monkeypatch):
    beat = host.Host._beat
    monkeypatch.setattr(host.Host, "_beat", lambda self, state, now_s: state == "gone" or beat(self, state, now_s))
    assert is_found("stay", is_calm)


def test_a_state_that_is_read_ahead_before_its_iteration_is_planned_is_found(monkeypatch):
    monkeypatch.setattr(phase_poller.PhasePoller, "planned", property(lambda self: self._iteration))
    assert is_found("early")


def test_a_run_that_is_not_left_alone_after_a_phase_that_failed_is_found(monkeypatch):
    monkeypatch.setattr(host.Host, "_put_off", lambda _, served: setattr(served, "due", None))
    assert is_found("hasty", lambda history: any(strike.kind == "worker" for strike in history.strikes))


def test_a_state_that_leaves_memory_although_that_holds_all_is_found(monkeypatch):
    def all_that_may(states, *_):
        return tuple(one.run for one in states if one.num_bytes and not one.busy)

    def fits(history):
        return sum(run.state_bytes for run in history.runs) <= min(each.memory_bytes for each in history.hosts)

    monkeypatch.setattr(state_cache, "make_room", all_that_may)
    assert is_found("memory", lambda history: is_calm(history) and len(history.runs) > 1 and fits(history))
