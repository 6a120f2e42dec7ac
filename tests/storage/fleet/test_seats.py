"""Seats on stores: one host takes each epoch, whatever happens to its requests and answers."""

import threading

import pytest

from storage.fleet import fleet_layout
from storage.fleet.fleet_records import SeatRecord
from storage.fleet.seats import newest_seat, read_seat, take_seat
from storage.records import records
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject, ObjectMissing, StoreUnavailable

RUN, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture(params=["memory", "local"])
def store(request, tmp_path):
    return MemoryStore("fleet") if request.param == "memory" else LocalStore(tmp_path)


def test_a_seat_is_vacant_then_taken_and_then_taken_over(store):
    assert newest_seat(store, RUN) is None
    assert take_seat(store, RUN, 0, "a")
    assert take_seat(store, OTHER, 0, "b")
    assert take_seat(store, RUN, 1, "c")
    seat = newest_seat(store, RUN)
    assert (seat.run, seat.epoch, seat.host) == (RUN, 2, "c")
    assert read_seat(store, RUN, 1).host == "a"
    with pytest.raises(ObjectMissing):
        read_seat(store, RUN, 3)


def test_the_second_to_take_an_epoch_does_not_get_it_and_changes_nothing(store):
    assert take_seat(store, RUN, 0, "a")
    before = store.get(fleet_layout.seat(RUN, 1))
    assert not take_seat(store, RUN, 0, "b")
    assert store.get(fleet_layout.seat(RUN, 1)) == before


def test_the_epochs_are_ordered_as_numbers(store):
    for epoch in (999_999, 1_000_000):
        records.put(store, fleet_layout.seat(RUN, epoch), SeatRecord(run=RUN, epoch=epoch, host="a"))
    assert newest_seat(store, RUN).epoch == 1_000_000


def test_of_many_hosts_exactly_one_takes_an_epoch(store):
    results, ready = [], threading.Barrier(8)

    def take(name):
        ready.wait()
        results.append((take_seat(store, RUN, 0, name), name))

    threads = [threading.Thread(target=take, args=(f"host-{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [name for taken, name in results if taken] == [newest_seat(store, RUN).host]


class LosingAnswers(MemoryStore):
    """Creates, and says that there was no answer, or, of a request that a client repeated, that it exists."""

    def __init__(self, *, repeated):
        super().__init__()
        self.repeated = repeated

    def create(self, key, body):
        if super().create(key, body) and not self.repeated:
            raise StoreUnavailable("no answer")
        return False


@pytest.mark.parametrize("repeated", [False, True])
def test_a_host_recognises_its_own_seat_after_a_lost_answer(repeated):
    store = LosingAnswers(repeated=repeated)
    assert take_seat(store, RUN, 0, "a")
    assert not take_seat(store, RUN, 0, "b")
    assert newest_seat(store, RUN).host == "a"


def test_a_request_that_was_lost_leaves_the_outcome_unknown():
    class Losing(MemoryStore):
        def create(self, key, body):
            raise StoreUnavailable("no answer")

    store = Losing()
    with pytest.raises(StoreUnavailable):
        take_seat(store, RUN, 0, "a")
    assert newest_seat(store, RUN) is None


def test_a_seat_under_the_key_of_another_is_refused(store):
    key = fleet_layout.seat(RUN, 1)
    records.put(store, key, SeatRecord(run=OTHER, epoch=1, host="a"))
    with pytest.raises(CorruptObject, match="it is of 'runs/"):
        read_seat(store, RUN, 1)


def test_keys_that_are_no_seats_are_passed_over(store):
    store.put(f"{fleet_layout.seats(RUN)}note.txt", b"x")
    assert newest_seat(store, RUN) is None
    assert fleet_layout.seat_address(fleet_layout.seat(RUN, 12)) == (RUN, 12)
    assert fleet_layout.seat_address(fleet_layout.admitted(RUN)) is None
