"""What a host spends, and who pays: every second once, to the last bit that a clock has."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.fleet import fleet_layout
from storage.fleet.spent_records import SpentEntry, SpentRecord
from storage.records import records
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.sharing.billing import bill, total_s
from tasks.sharing.spending import Spending

SHARES = {"a": 1.0, "b": 3.0, "c": 0.1}
KINDS = st.sampled_from(["switch", "wait", "train", "park", "idle"])
STEPS = st.lists(
    st.tuples(st.floats(0, 1e4), KINDS, st.sampled_from("abc"), st.sets(st.sampled_from("abc")), st.booleans()),
    max_size=30,
)


def spent_by(store, host="h"):
    return [records.read(store, SpentRecord, key) for key in store.list(fleet_layout.spent_by(host))]


def entry(kind, run, began_s, ended_s):
    return SpentEntry(kind=kind, run=run, iteration=None if run is None else 0, began_s=began_s, ended_s=ended_s)


def record(sequence, entries, seated):
    return SpentRecord(host="h", sequence=sequence, entries=tuple(entries), seated=tuple(seated))


@given(steps=STEPS, zero_s=st.floats(0, 1e6), tail_s=st.floats(0, 1e4))
def test_all_bills_of_a_host_add_up_to_its_lifetime(steps, zero_s, tail_s):
    store, spending, now_s = MemoryStore(), Spending("h"), zero_s
    for wait_s, kind, run, seated, ends in steps:
        now_s += wait_s
        spending.note(kind, None if kind == "idle" else run, None if kind == "idle" else 0, now_s - zero_s)
        if ends:
            spending.record(seated, now_s - zero_s)
    lived_s = now_s + tail_s - zero_s
    spending.record({"a", "c"}, lived_s)
    spending.write(store)
    assert spending.is_written
    billed = bill(spent_by(store), lived_s, SHARES)
    assert math.isclose(total_s(billed), lived_s, rel_tol=0.0, abs_tol=1e-9)
    assert all(seconds >= 0 for kinds in billed.values() for seconds in kinds.values())


def test_a_phase_is_its_runs_and_idle_time_is_divided_by_share():
    spent = [
        record(0, [entry("idle", None, 0, 4), entry("switch", "a", 4, 5), entry("train", "a", 5, 9)], ["a", "b"]),
        record(1, [entry("idle", None, 9, 11)], ["a"]),
        record(2, [entry("idle", None, 11, 12)], []),
    ]
    assert bill(spent, 12.0, SHARES) == {
        "a": {"idle": 1.0 + 2.0, "switch": 1.0, "train": 4.0},
        "b": {"idle": 3.0},
        None: {"idle": 1.0},
    }


def test_what_a_lost_host_had_not_recorded_is_idle_and_what_it_had_counts_beyond_its_last_heartbeat():
    spent = [record(0, [entry("train", "a", 0, 10)], ["b"])]
    assert bill(spent, 14.0, SHARES) == {"a": {"train": 10.0}, "b": {"idle": 4.0}}
    assert bill(spent, 8.0, SHARES) == {"a": {"train": 10.0}}
    assert bill([], 5.0, SHARES) == {None: {"idle": 5.0}}


@pytest.mark.parametrize(
    "spent",
    [
        [record(0, [entry("idle", None, 1, 2)], [])],
        [record(0, [entry("idle", None, 0, 2), entry("train", "a", 1, 3)], [])],
        [record(0, [entry("idle", None, 0, 2)], []), record(0, [entry("idle", None, 2, 3)], [])],
        [record(1, [entry("idle", None, 0, 2)], [])],
        [record(0, [entry("idle", None, 0, 0)], [])],
    ],
)
def test_seconds_that_are_missing_or_there_twice_are_an_error(spent):
    with pytest.raises(ValueError, match="host h"):
        bill(spent, 3.0, SHARES)


class Losing(MemoryStore):
    """Loses the first answers, after it has done what was asked or before."""

    def __init__(self, faults):
        super().__init__()
        self.faults = list(faults)

    def create(self, key, body):
        fault = self.faults.pop(0) if self.faults else None
        if fault == "before":
            raise StoreUnavailable("lost")
        created = super().create(key, body)
        if fault == "after":
            raise StoreUnavailable("lost")
        return created


@given(st.lists(st.sampled_from(["before", "after", None]), max_size=6))
def test_records_whose_answers_were_lost_are_offered_again_and_written_once(faults):
    store, spending = Losing(faults), Spending("h")
    for number in range(4):
        spending.note("train", "a", number, 10.0 * number)
        spending.record(["a"], 10.0 * number + 10.0)
        try:
            spending.write(store)
        except StoreUnavailable:
            continue
    while not spending.is_written:
        try:
            spending.write(store)
        except StoreUnavailable:
            continue
    assert bill(spent_by(store), 40.0, SHARES) == {"a": {"train": 40.0}}
