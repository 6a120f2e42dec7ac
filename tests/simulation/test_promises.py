"""Bugs that break a promise to the user and lose no token are found by the judge."""

from contextlib import suppress

import pytest

from simulation.simulated_history import draw_history
from storage import records
from storage.records import BatchRecord
from storage.store import ObjectMissing
from tasks.learning.recorded_batches import RecordedBatches
from tasks.sampling.session import decode_lane
from tasks.sampling.session.actions import Beat, WriteShard
from tasks.sampling.session.claimant import Claimant
from tasks.sampling.session.flush_lane import FlushLane
from tasks.sampling.session.holdings import Holdings
from tests.judged_histories import is_found

pytestmark = pytest.mark.slow

# `python -m benchmarks.histories` plays these seeds, too, without the bugs.
SEEDS = range(400)


def histories(*first):
    """The default histories, those first that are known to show the bug, so that the test is short."""
    return (draw_history(seed) for seed in (*first, *SEEDS))


def test_a_member_that_flushes_ten_times_too_rarely_is_found(monkeypatch):
    flush = FlushLane._flush

    def rarely(lane):
        lane.count = getattr(lane, "count", 0) + 1
        if lane.count % 10 == 0:
            yield from flush(lane)

    monkeypatch.setattr(FlushLane, "_flush", rarely)
    assert is_found(histories(14, 15, 17), promise=2)


def test_a_member_that_leaves_without_a_last_flush_is_found(monkeypatch):
    hand_in = decode_lane._hand_in

    def without(state):
        steps, result = hand_in(state), None
        with suppress(StopIteration):
            while True:
                action = steps.send(result)
                result = 0 if isinstance(action, WriteShard) else (yield action)

    monkeypatch.setattr(decode_lane, "_hand_in", without)
    assert is_found(histories(15), promise=1)


def test_a_member_that_says_gone_before_its_last_flush_is_found(monkeypatch):
    hand_in = decode_lane._hand_in

    def early(state):
        if state.announced:
            before, state.holdings.state = state.holdings.state, "gone"
            yield Beat(state.vitals())
            state.holdings.state = before
        yield from hand_in(state)

    monkeypatch.setattr(decode_lane, "_hand_in", early)
    assert is_found(histories(5, 15, 18), promise=2)


def test_a_zombie_that_decodes_what_others_have_claimed_is_found(monkeypatch):
    monkeypatch.setattr(Holdings, "see", lambda *_: 0)
    assert is_found(histories(17, 18, 19), promise=2)


def test_a_member_that_ignores_the_end_is_found(monkeypatch):
    closed = Claimant.closed

    def only_before_it_claims(claimant):
        asked, claimant.asked = getattr(claimant, "asked", False), True
        return not asked and closed(claimant)

    monkeypatch.setattr(Claimant, "closed", only_before_it_claims)
    assert is_found(histories(2), promise=1)


def test_a_zombie_trainer_that_keeps_its_own_batch_is_found(monkeypatch):
    def own(batches, number, key):
        with suppress(ObjectMissing):
            return records.read(batches._store, BatchRecord, key)
        batch = batches._new_batch(number, lambda: False)
        records.commit(batches._store, key, batch)
        return batch

    monkeypatch.setattr(RecordedBatches, "_batch", own)
    assert is_found(histories(76, 85), doubled=1)
