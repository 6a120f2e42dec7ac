"""Scorers that wait for long responses, that share a number, and that have left."""

import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from storage.clock import ManualClock
from storage.journal.liveness import read_heartbeat
from storage.journal.shard import Finish, decode_shard, encode_shard
from storage.records import layout
from storage.stores.memory import NestedStore
from tasks.sampling.session.session_outcome import Preempted
from tests.scored_run import SCORING, URL, claims_of, opened, session, settings
from tests.small_run import everything, memory_store, model_directory, plan_iteration, roll_out

PIECES = 3


@pytest.fixture(scope="module")
def rolled_out(tmp_path_factory):
    """All objects of a run whose first rollout has ended; the policy is its own teacher."""
    model = model_directory(tmp_path_factory.mktemp("model"))
    store = memory_store("scored")
    plan_iteration(settings(model, {"path": str(model), "pool": "teachers"}))
    roll_out(URL, 0)
    return everything(store)


class GrowingJournal(ManualClock):
    """A clock by which a held-back shard comes every minute."""

    def __init__(self, store, held):
        super().__init__()
        self.store, self.held, self.next_s = store, held, 60.0

    def sleep(self, duration_s):
        super().sleep(duration_s)
        if self.held and self.monotonic() > self.next_s:
            self.next_s += 60.0
            self.store.create(*self.held.pop(0))


def in_pieces(key, body):
    """The shard as several, each with a part of the tokens of every response."""
    rows = decode_shard(key, body)
    for number in range(PIECES):
        parts = []
        for row in rows:
            cuts = np.linspace(0, len(row.token_ids), PIECES + 1).astype(int)[number : number + 2]
            part, is_last = slice(*cuts), number == PIECES - 1
            parts.append(
                replace(
                    row,
                    start=row.start + int(cuts[0]),
                    token_ids=row.token_ids[part],
                    logprobs=row.logprobs[part],
                    finish=row.finish if is_last else Finish.RUNNING,
                )
            )
        folder, _, name = key.rpartition("/")
        later = int(name.removesuffix(".arrow")) * PIECES + number
        yield f"{folder}/{later:08d}.arrow", encode_shard(parts)


def test_a_scorer_waits_as_long_as_tokens_come(rolled_out):
    whole = {key: body for key, body in rolled_out.items() if key.startswith(layout.journal(0))}
    held = [each for shard in whole.items() for each in in_pieces(*shard)]
    store = opened({key: body for key, body in rolled_out.items() if key not in whole})
    # No group ends within trainer.group_timeout_s, which is 90 s.
    clock = GrowingJournal(store, sorted(held, key=lambda each: each[0].rpartition("/")[2]))
    assert session(store, clock=clock).run() == 12
    assert clock.monotonic() > 240


def test_a_scorer_leaves_once_no_token_comes(rolled_out):
    store = opened({key: body for key, body in rolled_out.items() if not key.startswith(layout.journal(0))})
    clock = ManualClock()
    assert session(store, clock=clock).run() == 0
    assert clock.monotonic() == pytest.approx(90.0)


def test_gone_is_the_last_word_of_a_scorer(rolled_out):
    store = opened(rolled_out)
    late = session(store)
    late.run()
    # The thread of heartbeats may beat once more.
    late.beat()
    within = NestedStore(store, SCORING.rstrip("/"))
    [key] = within.list(layout.alive_all(0))
    assert read_heartbeat(within, key).state == "gone"


def test_a_process_takes_no_group_back_from_its_successor_of_the_same_number(rolled_out):
    store, clock = opened(rolled_out), ManualClock()
    has_claimed, may_go_on = threading.Event(), threading.Event()

    def freezes():
        if len(claims_of(store)[0]) == 2:
            has_claimed.set()
            may_go_on.wait(60)
        return False

    successor = threading.Thread(target=session(store, clock=clock, notice=freezes).run, daemon=True)

    def starts_successor():
        if 0 in claims_of(store) and not has_claimed.is_set():
            successor.start()
            assert has_claimed.wait(60)
        return clock.monotonic() > 5

    with suppress(Preempted):
        session(store, clock=clock, notice=starts_successor).run()
    claims = claims_of(store)
    may_go_on.set()
    successor.join(60)
    assert {unit: len(keys) for unit, keys in claims.items()} == {0: 2, 1: 1, 2: 1, 3: 1}
