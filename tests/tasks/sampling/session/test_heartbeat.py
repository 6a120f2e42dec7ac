from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.draft_totals import DraftTotals
from storage.records.records import SamplingParams
from storage.stores.memory import MemoryStore
from tasks.sampling.engines.scripted_drafter import ScriptedDrafter, perfect
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.testing import VOCAB_SIZE, request, run
from tasks.sampling.session.actions import HeartbeatState
from tasks.sampling.session.performer import HeartbeatWriter
from tasks.sampling.session.session_config import SessionConfig

EVERY_S, CLAIM_TTL_S = 5.0, 30.0
STATE = HeartbeatState(
    state="working",
    tokens_generated=0,
    tokens_recovered=0,
    responses_finished=0,
    claims=0,
    unfinished=0,
    running=0,
    waiting=0,
    acting=0,
    released=0,
    plateau=0,
    room=0,
    working_at_s=None,
    decode_s=0.0,
    step_s=(),
)


CONFIG = SessionConfig(
    slot=0,
    pool="rollout",
    host="h",
    pid=1,
    flush_interval_s=EVERY_S,
    idle_timeout_s=60.0,
    heartbeat_interval_s=EVERY_S,
    claim_ttl_s=CLAIM_TTL_S,
)


@pytest.fixture
def told():
    """told(runnings, per_response) -> the rates when so many responses ran in each interval, at so many tokens/s."""

    def tell(runnings, per_response):
        store, clock = MemoryStore(), ManualClock(0.0)
        writer = HeartbeatWriter(store, 0, "a", ScriptedEngine(50, 4), CONFIG, clock)
        rates, tokens = [], 0.0
        for before, after in zip([runnings[0], *runnings], runnings, strict=False):
            writer.beat(replace(STATE, tokens_generated=round(tokens), running=before))
            rates.append(records.read(store, HeartbeatRecord, layout.alive(0, "a")).tokens_per_s)
            clock.sleep(EVERY_S)
            tokens += EVERY_S * per_response * (before + after) / 2
        return rates

    return tell


def test_a_rate_is_told_after_half_a_claim_ttl_of_decoding(told):
    assert told([8] * 6, 10.0) == [None, None, None, *[pytest.approx(80.0)] * 3]


def test_a_member_without_a_running_response_tells_no_rate_and_begins_anew(told):
    rates = told([4, 4, 4, 4, 0, 4, 4, 4, 4], 10.0)
    assert rates[5] is None
    assert rates[6:] == [None, None, None]


def test_a_heartbeat_counts_the_drafts_of_its_own_incarnation():
    """A standing member's engine has decoded for earlier iterations."""
    store, clock = MemoryStore(), ManualClock(0.0)
    drafter = ScriptedDrafter(VOCAB_SIZE, perfect, answer=lambda item: engine.scripted_tokens(item, 100))
    speculation = Speculation(drafter, 4, now_s=clock.monotonic)
    engine = ScriptedEngine(VOCAB_SIZE, 4, clock=clock, step_time_s=lambda _: 1.0, speculation=speculation)
    engine.load_weights(0, {})
    # Each response has six tokens: five from the first step, and one from a step without drafts.
    six = [replace(request(r), sampling=SamplingParams(max_completion_length=6)) for r in range(4)]
    run(engine, six)
    writer = HeartbeatWriter(store, 0, "a", engine, CONFIG, clock)
    writer.beat(STATE)
    assert records.read(store, HeartbeatRecord, layout.alive(0, "a")).drafts == DraftTotals()
    run(engine, six[:3])
    writer.beat(STATE)
    counts = records.read(store, HeartbeatRecord, layout.alive(0, "a")).drafts
    assert replace(counts, saved_s=None) == DraftTotals(steps=6, tokens=18, drafted=12, accepted=12)


def test_a_member_without_drafts_tells_nothing_of_them():
    store = MemoryStore()
    HeartbeatWriter(store, 0, "a", ScriptedEngine(50, 4), CONFIG, ManualClock(0.0)).beat(STATE)
    assert records.read(store, HeartbeatRecord, layout.alive(0, "a")).drafts is None
    assert b"drafts" not in store.get(layout.alive(0, "a"))
