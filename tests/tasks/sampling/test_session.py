"""The session against real stores: kills at any step, restarts, zombies, notices; always the undisturbed tokens."""

import itertools
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import layout, records
from storage.assembly import JournalReader
from storage.clock import ManualClock, SystemClock
from storage.connect import connect
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.prompt_table import PromptRow
from storage.records import AliveRecord, ClosedRecord, PlanRecord, SamplingParams, SlotPlan
from storage.store import StoreUnavailable
from tasks.planning.plan import assign_groups
from tasks.sampling.engine import EngineError
from tasks.sampling.scripted_engine import ScriptedEngine
from tasks.sampling.session import Preempted, Session, SessionConfig

GENERATIONS, GROUPS, SLOTS, IN_FLIGHT = 3, 5, 2, 4
PROMPTS = [PromptRow(str(k), (1, 2, k + 3), "p", {}) for k in range(GROUPS)]


def a_plan() -> PlanRecord:
    return PlanRecord(
        iteration=0,
        weight_version=0,
        run_seed=3,
        num_generations=GENERATIONS,
        prompts_key="prompts",
        first_prompt=0,
        slots=tuple(
            SlotPlan(slot=slot, pool="rollout", groups=groups)
            for slot, groups in enumerate(assign_groups(GROUPS, SLOTS))
        ),
        sampling=SamplingParams(max_completion_length=40, stop_token_ids=(0,)),
        config={},
        created_at_s=0.0,
    )


class Killed(BaseException):
    """SIGKILL: nothing of the victim runs afterwards."""


class DiesAfter(ScriptedEngine):
    """Its process is killed in the middle of a step."""

    def __init__(self, steps: int, **given) -> None:
        super().__init__(50, IN_FLIGHT, median_length=12, **given)
        self.left = steps

    def step(self):
        if self.left == 0:
            raise Killed
        self.left -= 1
        return super().step()


def load(engine):
    engine.load_weights(0, {})


def a_session(
    store,
    slot,
    *,
    steps=10**9,
    clock=None,
    notice=lambda: False,
    flush_interval_s=3.0,
    background=False,
    load=load,
    idle_timeout_s=0.0,
):
    clock = clock or ManualClock()
    engine = DiesAfter(steps, clock=clock, step_time_s=lambda _: 1.0)
    config = SessionConfig(
        slot=slot,
        pool="rollout",
        host="here",
        pid=os.getpid(),
        flush_interval_s=flush_interval_s,
        heartbeat_interval_s=flush_interval_s,
        claim_ttl_s=4 * flush_interval_s,
        idle_timeout_s=idle_timeout_s,
        background=background,
    )
    return Session(
        store, a_plan(), prompts=PROMPTS, engine=engine, load=load, config=config, clock=clock, notice=notice
    )


def live(session):
    return session.run()


def responses(store):
    reader = JournalReader(store, a_plan())
    reader.refresh()
    found = [reader.assemble(response) for response in range(GROUPS * GENERATIONS)]
    assert all(response.finish.ends_response for response in found)
    return [(r.token_ids.tolist(), r.logprobs.tolist(), r.finish) for r in found]


def undisturbed():
    store = MemoryStore()
    for slot in range(SLOTS):
        live(a_session(store, slot))
    return responses(store)


EXPECTED = undisturbed()


def test_lengths_differ_so_that_slots_are_refilled():
    assert len({len(tokens) for tokens, _, _ in EXPECTED}) > 4


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 60)), max_size=12), st.sampled_from([1.0, 3.0, 7.0])
)
def test_killed_at_any_steps_it_ends_with_the_undisturbed_tokens(kills, flush_interval_s):
    store = MemoryStore()
    for slot, steps in kills:
        try:
            live(a_session(store, slot, steps=steps, flush_interval_s=flush_interval_s))
        except Killed:
            continue
    for slot in range(SLOTS):
        live(a_session(store, slot))
    assert responses(store) == EXPECTED


def test_a_kill_costs_at_most_one_flush_interval_of_tokens():
    """The scripted engine takes 1 s a step, so a flush interval of 5 s is at most 5 steps of each row."""
    for steps in range(1, 40):
        store = MemoryStore()
        victim = a_session(store, 0, steps=steps, flush_interval_s=5.0)
        with pytest.raises(Killed):
            live(victim)
        generated = victim.outcome().tokens_generated
        successor = a_session(store, 0)
        successor.claim()
        assert generated - successor.outcome().tokens_recovered <= 5 * IN_FLIGHT


@pytest.mark.parametrize("kind", ["memory", "local", "s3"])
def test_results_are_the_same_on_every_store(kind, tmp_path, request):
    store = {
        "memory": MemoryStore,
        "local": lambda: LocalStore(tmp_path),
        "s3": lambda: connect(f"{request.getfixturevalue('s3_url')}/session"),
    }[kind]()
    for steps in (4, 9):
        with pytest.raises(Killed):
            live(a_session(store, 1, steps=steps))
    for slot in range(SLOTS):
        live(a_session(store, slot))
    assert responses(store) == EXPECTED


def test_a_notice_loses_nothing_and_hands_everything_over():
    store = MemoryStore()
    told = [False] * 10 + [True]
    victim = a_session(store, 0, notice=lambda: told.pop(0), flush_interval_s=60.0)
    with pytest.raises(Preempted):
        live(victim)
    alive = records.read(store, AliveRecord, layout.alive(0, victim.incarnation))
    assert alive.state == "gone"
    successor = a_session(store, 0)
    successor.claim()
    assert successor.outcome().tokens_recovered == victim.outcome().tokens_generated > 0


def test_an_engine_that_fails_loses_no_token_it_had_handed_over():
    store = MemoryStore()
    victim = a_session(store, 0, flush_interval_s=60.0)
    victim.claim()
    step, left = victim._engine.step, [1] * 7

    def fails():
        if not left:
            raise EngineError("out of memory")
        left.pop()
        return step()

    victim._engine.step = fails
    with pytest.raises(EngineError, match="out of memory"):
        victim.run()
    successor = a_session(store, 0)
    successor.claim()
    assert successor.outcome().tokens_recovered == victim.outcome().tokens_generated > 0


def test_a_zombie_stops_when_it_learns_that_its_slot_was_taken_over():
    store = MemoryStore()
    zombie = a_session(store, 0, flush_interval_s=1.0)
    zombie.claim()
    live(a_session(store, 0))
    outcome = zombie.run()
    assert outcome.responses_finished == 0
    live(a_session(store, 1))
    assert responses(store) == EXPECTED


def test_a_member_whose_slot_was_taken_by_one_that_dies_waits_and_takes_it_back():
    store = MemoryStore()
    member = a_session(store, 0, flush_interval_s=1.0)
    member.claim()
    a_session(store, 0).claim()  # and is never heard of again
    assert member.run().responses_finished >= len(a_plan().responses_of(0))
    live(a_session(store, 1))
    assert responses(store) == EXPECTED


def test_a_finished_slot_has_nothing_left_to_claim_and_loads_no_weights():
    store = MemoryStore()
    live(a_session(store, 0))
    again = a_session(store, 0, load=lambda _: pytest.fail("nothing is left to generate"))
    assert again.claim() == 0
    assert again.run().tokens_generated == 0


def test_remaining_budget_after_resume_is_what_was_left():
    store = MemoryStore()
    with pytest.raises(Killed):
        live(a_session(store, 0, steps=11, flush_interval_s=1.0))
    live(a_session(store, 0))
    live(a_session(store, 1))
    assert max(len(tokens) for tokens, _, _ in responses(store)) <= a_plan().sampling.max_completion_length
    assert responses(store) == EXPECTED


def test_the_flush_thread_gives_the_same_journal(tmp_path):
    store = LocalStore(tmp_path)
    for slot in range(SLOTS):
        session = a_session(store, slot, clock=SystemClock(), background=True, flush_interval_s=0.05)
        session._engine._step_time_s = lambda _: 0.01
        live(session)
    assert responses(store) == EXPECTED


class Throttled(MemoryStore):
    """A store that refuses every second shard the first time."""

    refused: frozenset[str] = frozenset()

    def create(self, key, body):
        if "journal" in key and key not in self.refused and key.endswith(("1.arrow", "3.arrow")):
            self.refused |= {key}
            raise StoreUnavailable("slow down")
        return super().create(key, body)


def test_a_flush_that_fails_now_and_then_is_made_up_for():
    store = Throttled()
    for slot in range(SLOTS):
        live(a_session(store, slot, flush_interval_s=1.0))
    assert store.refused
    assert responses(store) == EXPECTED


@pytest.mark.parametrize(("flush_interval_s", "heartbeat_interval_s"), [(5.0, 5.0), (5.0, 4.0), (5.0, 3.0), (4.0, 9.0)])
def test_no_token_waits_longer_than_the_flush_interval(flush_interval_s, heartbeat_interval_s):
    store, clock, moments = MemoryStore(), ManualClock(), [0.0]
    session = a_session(store, 0, clock=clock, flush_interval_s=flush_interval_s)
    session._config = replace(session._config, heartbeat_interval_s=heartbeat_interval_s)
    session._wake_interval_s = min(flush_interval_s, heartbeat_interval_s)
    session._keeping._interval_s = session._wake_interval_s
    flush = session._writer.flush
    session._writer.flush = lambda: moments.append(clock.monotonic()) or flush()
    live(session)
    assert max(b - a for a, b in itertools.pairwise(moments)) <= flush_interval_s + 1.0  # and one step of 1 s


def test_losing_a_race_for_the_slot_while_the_predecessor_still_writes_loses_no_token():
    """The winner seals more of the predecessor than the loser had read; the loser then takes over from the winner."""
    store = MemoryStore()
    predecessor = a_session(store, 0, flush_interval_s=1.0, steps=6)
    predecessor.claim()
    loser = a_session(store, 0)

    create, done = store.create, []

    def others_first(key, body):
        if "/claims/00000/000002" in key and not done:
            done.append(key)
            with pytest.raises(Killed):
                predecessor.run()
            a_session(store, 0).claim()
        return create(key, body)

    store.create = others_first
    loser.claim()
    assert done
    loser.run()
    live(a_session(store, 1))
    assert responses(store) == EXPECTED


class Unreachable(MemoryStore):
    """A store that stops answering creates after a while."""

    left = 6

    def create(self, key, body):
        self.left -= 1
        if self.left < 0 and "journal" in key:
            raise StoreUnavailable("no answer")
        return super().create(key, body)


def test_a_store_that_is_gone_for_good_ends_the_session_by_name():
    with pytest.raises(StoreUnavailable, match="left nothing behind"):
        live(a_session(Unreachable(), 0, flush_interval_s=1.0))


HELPS_S = 1e6


def test_a_member_with_nothing_left_takes_over_the_dead_and_finishes_the_iteration_alone():
    store, clock = MemoryStore(), ManualClock()
    with pytest.raises(Killed):
        live(a_session(store, 0, steps=7, flush_interval_s=2.0))
    outcome = live(a_session(store, 1, clock=clock, flush_interval_s=2.0, idle_timeout_s=HELPS_S))
    assert responses(store) == EXPECTED
    assert outcome.tokens_recovered > 0


def test_one_that_joined_works_without_any_slot_and_loads_weights_only_for_work():
    store, clock, loads = MemoryStore(), ManualClock(), []
    joined = a_session(
        store, SLOTS, clock=clock, load=lambda engine: loads.append(1) or load(engine), idle_timeout_s=9.0
    )
    assert live(joined).responses_finished == GROUPS * GENERATIONS
    assert responses(store) == EXPECTED
    assert loads == [1]
    again = a_session(store, SLOTS + 1, load=lambda _: pytest.fail("there is no work"), idle_timeout_s=HELPS_S)
    assert live(again).responses_finished == 0


def test_one_that_joined_leaves_when_its_time_is_up_and_loses_nothing():
    store = MemoryStore()
    joined = a_session(store, SLOTS, clock=ManualClock(), idle_timeout_s=HELPS_S, flush_interval_s=60.0)
    joined._ends_s = 6.0
    left = live(joined)
    alive = records.read(store, AliveRecord, layout.alive(0, joined.incarnation))
    assert (alive.state, alive.running) == ("gone", IN_FLIGHT)
    assert alive.unfinished == IN_FLIGHT - left.responses_finished
    outcome = live(a_session(store, 0, idle_timeout_s=HELPS_S))
    assert responses(store) == EXPECTED
    assert outcome.tokens_recovered + left.tokens_generated > left.tokens_generated


def test_it_waits_for_work_no_longer_than_the_idle_timeout_once_its_own_unit_has_ended():
    store, clock = MemoryStore(), ManualClock()
    busy = a_session(store, 1)
    busy.claim()
    member = a_session(store, 0, clock=clock, flush_interval_s=1.0, idle_timeout_s=3.0)

    def beats():
        busy._announce()
        return False

    member._notice = beats  # the other one lives, and holds on to what is its own
    busy._waiting.clear()
    live(member)
    assert 3.0 <= clock.monotonic() - max(len(tokens) for tokens, _, _ in EXPECTED) < 80
    assert busy._claimant.owned() == set(a_plan().responses_of(1))


def test_what_is_handed_over_is_continued_by_whoever_comes_without_a_wait():
    store = MemoryStore()
    giver = a_session(store, 0, clock=ManualClock(), flush_interval_s=1.0)
    giver.claim()
    for _ in range(6):
        giver._turn()
    given = sorted(giver._in_flight)[:2]
    giver.hand_over(given)
    giver.hand_over(given)
    giver._flush()
    giver._announce()
    alive = records.read(store, AliveRecord, layout.alive(0, giver.incarnation))
    assert (alive.released, alive.running) == (2, IN_FLIGHT - 2)
    live(a_session(store, 1))
    taker = a_session(store, SLOTS, clock=ManualClock(), idle_timeout_s=HELPS_S)
    taker.claim()
    assert sorted(work.response for work in taker._inbox) == given
    assert all(work.prefix for work in taker._inbox)


def test_what_nobody_takes_it_takes_again_itself():
    store = MemoryStore()
    giver = a_session(store, 0, clock=ManualClock(), flush_interval_s=1.0)
    giver.claim()
    for _ in range(6):
        giver._turn()
    giver.hand_over(list(giver._held))
    live(giver)
    live(a_session(store, 1))
    assert responses(store) == EXPECTED


@pytest.mark.parametrize("after", [0, 5])
def test_it_stops_when_the_trainer_closes_the_iteration(after):
    store = MemoryStore()
    member = a_session(store, 0, clock=ManualClock(), flush_interval_s=1.0)

    def closes():
        nonlocal after
        after -= 1
        if after == 0:
            store.create(layout.closed(0), records.encode(ClosedRecord(iteration=0, reason="done")))
        return False

    if after == 0:
        closes()
        store.create(layout.closed(0), records.encode(ClosedRecord(iteration=0, reason="done")))
    member._notice = closes
    outcome = live(member)
    assert outcome.tokens_generated <= 8 * IN_FLIGHT
    assert (outcome.tokens_generated == 0) == (not store.list("iterations/000000/claims/"))
