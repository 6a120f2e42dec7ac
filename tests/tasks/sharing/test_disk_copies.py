"""A run's store with copies on a disk: what is read from where, and that trouble with the disk loses nothing."""

import logging

import pytest

from storage import layout
from storage.memory import MemoryStore
from storage.store import CorruptObject, StoreDenied, StoreUnavailable
from storage.weights import tensor_sets
from storage.weights.tensor_sets import TensorBlock
from tasks.sharing.disk_copies import StoreWithCopies

FIRST, SECOND = layout.checkpoint(1), layout.checkpoint(2)


class FullDisk(MemoryStore):
    """It can be read and not be written."""

    def put(self, key, body):
        raise StoreDenied("no space left")


def publish(store, prefix, body=b"\x01\x02\x03\x04"):
    return tensor_sets.publish(store, prefix, {"t": TensorBlock("U8", (len(body),), body)}, {})


def pull(store, prefix):
    return bytes(store.read_sound(lambda: tensor_sets.pull(store, prefix))[1]["t"].data)


def read_by(copies, prefix):
    """The content, and whether it came from the disk."""
    before = copies.bytes_near, copies.bytes_far
    found = pull(copies, prefix)
    near, far = copies.bytes_near - before[0], copies.bytes_far - before[1]
    assert (near > 0) != (far > 0)
    return found, near > 0


@pytest.fixture
def true():
    return MemoryStore("true")


@pytest.fixture
def disk():
    return MemoryStore("disk")


@pytest.fixture
def copies(true, disk):
    return StoreWithCopies(true, disk)


def test_what_is_written_below_a_prefix_is_copied_and_read_from_there(true, disk, copies):
    publish(copies, FIRST)
    assert disk.list("") == []
    copies.copy_from_now(SECOND)
    publish(copies, SECOND)
    assert read_by(copies, FIRST) == (b"\x01\x02\x03\x04", False)
    assert read_by(copies, SECOND) == (b"\x01\x02\x03\x04", True)
    assert [key for key in disk.list("") if not key.endswith(".safetensors")] == []
    assert true.list(SECOND) == copies.list(SECOND)


def test_copies_of_earlier_states_go_and_those_of_the_first_weights_stay(true, disk, copies):
    publish(true, layout.weights(0))
    copies.copy_stored(layout.weights(0))
    copies.copy_from_now(FIRST)
    publish(copies, FIRST)
    copies.copy_from_now(SECOND)
    assert disk.list(FIRST) == []
    assert read_by(copies, layout.weights(0))[1]
    copies.drop_copies()
    assert disk.list("") == []
    assert read_by(copies, layout.weights(0)) == (b"\x01\x02\x03\x04", False)


@pytest.mark.parametrize("damage", [lambda body: body[:-1] + b"\xff", lambda body: body[:-2], lambda body: body + b"x"])
def test_a_damaged_copy_is_found_and_never_read_again(disk, copies, damage):
    copies.copy_from_now(FIRST)
    publish(copies, FIRST)
    [key] = disk.list("")
    disk.put(key, damage(disk.get(key)))
    assert pull(copies, FIRST) == b"\x01\x02\x03\x04"
    assert disk.list("") == []


def test_a_copy_of_another_state_is_not_asked_for(true, disk, copies):
    """Another host was first with other last bits."""
    copies.copy_from_now(FIRST)
    publish(StoreWithCopies(MemoryStore(), disk), FIRST, b"mine")
    publish(true, FIRST, b"theirs")
    assert read_by(copies, FIRST) == (b"theirs", False)


def test_damage_in_the_store_itself_is_an_error(true, copies):
    publish(true, FIRST)
    key = next(key for key in true.list(FIRST) if key.endswith(".safetensors"))
    true.put(key, true.get(key)[:-1] + b"\xff")
    with pytest.raises(CorruptObject, match=key):
        pull(copies, FIRST)


def test_a_full_disk_costs_nothing_but_a_warning(true, caplog):
    copies = StoreWithCopies(true, FullDisk("disk"))
    copies.copy_from_now(FIRST)
    with caplog.at_level(logging.WARNING):
        publish(copies, FIRST)
    assert "no space left" in caplog.text
    assert read_by(copies, FIRST) == (b"\x01\x02\x03\x04", False)


def test_ranks_are_asked_about_damaged_copies_also_where_the_store_does_not_answer(copies):
    """The others wait for this rank's word, because they have heard that it failed."""

    def read():
        raise StoreUnavailable("no answer")

    asked = []
    with pytest.raises(StoreUnavailable):
        copies.read_sound(read, lambda damaged: bool(asked.append(damaged)))
    assert asked == [False]
