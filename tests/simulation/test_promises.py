"""Bugs that break a promise to the user and lose no token are found by the judge."""

from contextlib import suppress
from dataclasses import replace

import pytest

from simulation.simulated_history import Strike
from storage.records import layout, records
from storage.records.records import BatchRecord
from storage.stores.store import ObjectMissing
from tasks.learning.recorded_batches import RecordedBatches
from tasks.sampling.session import decode_lane
from tasks.sampling.session.actions import WriteHeartbeat, WriteShard
from tasks.sampling.session.claimant import Claimant
from tasks.sampling.session.holdings import Holdings
from tasks.sampling.session.storage_lanes import FlushLane
from tests.judged_histories import drawn, is_found

pytestmark = pytest.mark.slow


def has(*kinds):
    """Whether a history has strikes of one of these kinds."""
    return lambda history: any(strike.kind in kinds for strike in history.strikes)


def closes_early(history):
    """Whether members may be decoding when the iteration is closed."""
    return history.plan.groups_wanted is not None and history.plan.groups_wanted < history.plan.num_groups / 2


def trainers_side_by_side():
    """The default histories in which trainers may make different micro-batches, with many that are frozen meanwhile."""
    freezes = tuple(Strike(at_s=at_s, kind="trainer freeze", duration_s=40.0) for at_s in range(15, 200, 15))
    for history in drawn(lambda history: history.plan.groups_wanted is None):
        yield replace(history, in_plan_order=False, micro_batch_tokens_max=300, strikes=freezes)


def test_a_member_that_flushes_ten_times_too_rarely_is_found(monkeypatch):
    flush = FlushLane._flush

    def rarely(lane):
        lane.count = getattr(lane, "count", 0) + 1
        if lane.count % 10 == 0:
            yield from flush(lane)

    monkeypatch.setattr(FlushLane, "_flush", rarely)
    assert is_found(drawn(), promise=1)


def test_a_member_that_leaves_without_a_last_flush_is_found(monkeypatch):
    hand_in = decode_lane._hand_in

    def without(state):
        steps, result = hand_in(state), None
        with suppress(StopIteration):
            while True:
                action = steps.send(result)
                result = 0 if isinstance(action, WriteShard) else (yield action)

    monkeypatch.setattr(decode_lane, "_hand_in", without)
    assert is_found(drawn(), promise=1)


def test_a_member_that_says_gone_before_its_last_flush_is_found(monkeypatch):
    hand_in = decode_lane._hand_in

    def early(state):
        if state.announced:
            before, state.holdings.state = state.holdings.state, "gone"
            yield WriteHeartbeat(state.heartbeat_state())
            state.holdings.state = before
        yield from hand_in(state)

    monkeypatch.setattr(decode_lane, "_hand_in", early)
    assert is_found(drawn(has("notice", "mass")), promise=1)


def test_a_zombie_that_decodes_what_others_have_claimed_is_found(monkeypatch):
    monkeypatch.setattr(Holdings, "see", lambda *_: 0)
    assert is_found(drawn(has("freeze", "suspend")), promise=1)


def test_a_member_that_ignores_the_end_is_found(monkeypatch):
    closed = Claimant.closed

    def only_before_it_claims(claimant):
        asked, claimant.asked = getattr(claimant, "asked", False), True
        return not asked and closed(claimant)

    monkeypatch.setattr(Claimant, "closed", only_before_it_claims)
    assert is_found(drawn(closes_early), promise=1)


def test_a_zombie_trainer_that_keeps_its_own_batch_is_found(monkeypatch):
    def own(batches, number):
        key = layout.batch(batches._plan.iteration, number)
        with suppress(ObjectMissing):
            return records.read(batches._store, BatchRecord, key)
        batch = batches._new_batch(number, lambda: False)
        records.commit(batches._store, key, batch)
        return batch

    monkeypatch.setattr(RecordedBatches, "_batch", own)
    assert is_found(trainers_side_by_side(), doubled=1)
