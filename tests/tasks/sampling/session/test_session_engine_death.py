"""Engines that die under a session: it goes on where they stopped, or gives everything away and says so."""

import logging
import weakref
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.clock import ManualClock, SystemClock
from storage.journal.assembly import JournalReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import ClosedRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.sampling.engines.engine import EngineDied, EngineError, TokenDelta
from tasks.sampling.session.session_outcome import EngineHealth, Preempted
from tests.property_examples import part_of_examples
from tests.sessions import EXPECTED, IN_FLIGHT, SLOTS, DiesAfter, a_plan, a_session, ask_for, live, responses

RESTARTS_MAX = 3
WHOLE = sum(len(EXPECTED[response][0]) for response in a_plan().responses_of(0))


class Mortal(DiesAfter):
    """Dies at its n-th call that may fail, for each n of `deaths` counted from the death before.

    Dead, it bears nothing but what the protocol allows. `calls` tells what it was asked, `returned` how many tokens it
    gave.
    """

    def __init__(self, steps: int, *, deaths=(), abort_kills=False, **given) -> None:
        super().__init__(steps, **given)
        self.deaths = list(deaths)
        self.abort_kills = abort_kills
        self.dead = False
        self.calls: list[str] = []
        self.returned = 0

    def load_weights(self, version, tensors):
        self._survive("load")
        super().load_weights(version, tensors)

    def start(self, requests):
        self._survive("start")
        super().start(requests)

    def step(self):
        deltas = super().step()
        self._survive("step")  # what it computed is lost
        self.returned += sum(len(delta.token_ids) for delta in deltas)
        return deltas

    def abort(self, responses):
        self._bear("abort")
        if self.abort_kills:
            self._die()
        super().abort(responses)

    def restart(self):
        self.dead = False
        self._survive("restart")
        super().restart()

    def _survive(self, call: str) -> None:
        self._bear(call)
        if self.deaths:
            self.deaths[0] -= 1
            if self.deaths[0] < 0:
                self.deaths.pop(0)
                self._die()

    def _bear(self, call: str) -> None:
        assert not self.dead, f"{call} on a dead engine"
        self.calls.append(call)

    def _die(self) -> None:
        self.dead = True
        self._table = None
        raise EngineDied("CUDA error: unspecified\nlaunch failure")


def mortal_session(store, slot, deaths, restarts_max=RESTARTS_MAX, **given):
    abort_kills = given.pop("abort_kills", False)
    engine = partial(Mortal, deaths=deaths, abort_kills=abort_kills)
    return a_session(store, slot, engine=engine, engine_restarts_max=restarts_max, **given)


def alive(store, session):
    return records.read(store, HeartbeatRecord, layout.alive(0, session.incarnation))


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR)


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.3))
@given(st.lists(st.integers(0, 60), max_size=RESTARTS_MAX), st.sampled_from([1.0, 5.0, 60.0]))
def test_an_engine_that_dies_at_any_calls_costs_no_token_it_had_returned(deaths, flush_interval_s):
    store = MemoryStore()
    session = mortal_session(store, 0, deaths, flush_interval_s=flush_interval_s)
    outcome = live(session)
    live(a_session(store, 1))
    assert responses(store) == EXPECTED
    assert session.engine.returned == outcome.tokens_generated == WHOLE
    assert session.state.death is None


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.2))
@given(st.lists(st.integers(0, 9), min_size=RESTARTS_MAX + 1, max_size=RESTARTS_MAX + 1))
def test_beyond_the_restarts_it_fails_and_its_successor_goes_on_at_once_with_every_token(deaths):
    store, clock = MemoryStore(), ManualClock()
    victim = mortal_session(store, 0, deaths, flush_interval_s=1e6, clock=clock)
    with pytest.raises(EngineDied, match="the engine died, 3 of 3 restarts tried: CUDA error: unspecified launch fail"):
        live(victim)
    assert victim.engine.calls.count("restart") == RESTARTS_MAX
    assert victim.state.death is not None
    assert alive(store, victim).state == "gone"
    reader, died_at_s = JournalReader(store, a_plan()), clock.monotonic()
    reader.refresh()
    assert sum(len(reader.assemble(r).token_ids) for r in a_plan().responses_of(0)) == victim.engine.returned
    successor = a_session(store, SLOTS, clock=clock, idle_timeout_s=9.0)
    assert successor.claim() > 0
    assert clock.monotonic() == died_at_s
    live(successor)
    live(a_session(store, 1))
    assert responses(store) == EXPECTED


@pytest.mark.parametrize(
    ("deaths", "calls"),
    [
        ([0], ["load", "restart", "load", "start", "step"]),
        ([1], ["load", "start", "restart", "load", "start", "step"]),
        ([2], ["load", "start", "step", "restart", "load", "start", "step"]),
        ([2, 0, 0], ["load", "start", "step", "restart", "restart", "restart", "load", "start", "step"]),
    ],
    ids=["load", "start", "step", "restart"],
)
def test_wherever_it_dies_it_is_restarted_and_loaded_before_anything_else(deaths, calls):
    store = MemoryStore()
    session = mortal_session(store, 0, deaths)
    live(session)
    assert session.engine.calls[: len(calls)] == calls
    assert session.engine.calls.count("restart") == calls.count("restart")


def test_what_was_in_flight_goes_on_first_and_in_its_order():
    store = MemoryStore()
    session = mortal_session(store, 0, [9])
    started = []
    start = session.engine.start

    def notes(requests):
        started.append([(request.response, len(request.generated_ids)) for request in requests])
        start(requests)

    session.engine.start = notes
    session.claim()
    while not session.state.death:
        session.advance()
    holdings = session.state.holdings
    assert holdings.state == "loading"
    assert not holdings.in_flight
    assert list(holdings.waiting) == list(holdings.held)
    began = [response for response, held in holdings.held.items() if held.token_ids]
    assert len(began) > 1
    while not holdings.in_flight:
        session.advance()
    session.advance()
    assert [response for response, _ in started[-1][: len(began)]] == began
    assert sum(length for _, length in started[-1]) > 0


def test_every_death_is_logged_with_its_reason(caplog):
    caplog.set_level(logging.WARNING)
    with pytest.raises(EngineDied):
        live(mortal_session(MemoryStore(), 0, [3, 0], restarts_max=1))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"slot 0: the engine died, {tried} of 1 restarts tried: CUDA error: unspecified launch failure"
        for tried in (0, 1)
    ]


class Heavy(Mortal):
    """Has much in its hands when it dies."""

    def step(self):
        class Activations:
            pass

        activations = Activations()
        self.activations = weakref.ref(activations)
        return super().step()

    def restart(self):
        assert self.activations() is None
        super().restart()


def test_what_the_engine_had_in_its_hands_when_it_died_is_free_before_it_is_restarted():
    """An exception that is kept keeps the frames it passed through, and their tensors on the device."""
    session = a_session(MemoryStore(), 0, engine=partial(Heavy, deaths=[4]), engine_restarts_max=1)
    live(session)
    assert session.engine.calls.count("restart") == 1


def test_other_errors_of_an_engine_are_not_worth_a_restart():
    session = mortal_session(MemoryStore(), 0, [])

    def fails():
        raise EngineError("log-prob nan")

    session.engine.step = fails
    with pytest.raises(EngineError, match=r"^log-prob nan$"):
        live(session)
    assert "restart" not in session.engine.calls


@pytest.mark.parametrize("restarts_max", [0, 5])
def test_a_notice_while_the_engine_is_dead_hands_everything_over(restarts_max):
    """Told between two restarts, or, where there is none, when the engine dies of being asked to forget."""
    store = MemoryStore()
    deaths = [5, 0, 0, 0, 0] if restarts_max else []

    def told():
        calls = victim.engine.calls
        return calls.count("restart") == 2 if restarts_max else calls.count("step") == 4

    victim = mortal_session(
        store, 0, deaths, restarts_max, flush_interval_s=1e6, abort_kills=not restarts_max, notice=told
    )
    with pytest.raises(Preempted):
        live(victim)
    assert victim.engine.dead
    assert alive(store, victim).state == "gone"
    successor = a_session(store, 0)
    successor.claim()
    assert successor.outcome().tokens_recovered == victim.outcome().tokens_generated > 0


def test_when_the_iteration_is_closed_over_a_dead_engine_it_leaves_without_touching_it():
    store = MemoryStore()
    health = EngineHealth()
    member = mortal_session(
        store, 0, [5, *[0] * 99], restarts_max=100, flush_interval_s=1.0, idle_timeout_s=9.0, health=health
    )
    restart = member.engine.restart

    def closes():
        member.clock.sleep(2.0)
        if not store.list(layout.closed(0)):
            records.commit(store, layout.closed(0), ClosedRecord(iteration=0, reason="done"))
        restart()

    member.engine.restart = closes
    live(member)
    assert health.died
    assert 1 <= member.engine.calls.count("restart") < 5


@pytest.mark.slow
def test_an_engine_that_dies_of_being_told_to_forget_is_restarted_like_any_other():
    store = MemoryStore()
    session = mortal_session(store, 0, [], flush_interval_s=1.0, abort_kills=True)
    session.claim()
    while session.engine.calls.count("step") < 4:
        session.advance()
    ask_for(store, session, sorted(session.state.holdings.in_flight)[:2])
    while not session.engine.dead:
        session.advance()
    session.advance()
    assert not session.state.holdings.in_flight
    session.engine.abort_kills = False
    live(session)
    live(a_session(store, 1))
    assert responses(store) == EXPECTED
    assert session.engine.returned == session.outcome().tokens_generated


@pytest.mark.slow
def test_in_two_threads_it_is_the_same():
    store = MemoryStore()
    engine = Mortal(10**9, deaths=[4, 3, 6], clock=SystemClock(), step_time_s=lambda _: 0.01)
    session = a_session(
        store,
        0,
        engine=lambda *_, **__: engine,
        engine_restarts_max=RESTARTS_MAX,
        clock=SystemClock(),
        in_threads=True,
        flush_interval_s=0.05,
    )
    live(session)
    live(a_session(store, 1))
    assert responses(store) == EXPECTED
    assert engine.returned == WHOLE


class Bursts(DiesAfter):
    """Returns the tokens of three steps at once, and of every second response only every other time."""

    def __init__(self, steps: int, **given) -> None:
        super().__init__(steps, **given)
        self.kept: dict[int, TokenDelta] = {}
        self.turn = 0

    def step(self):
        self.turn += 1
        for delta in (delta for _ in range(3) for delta in super(Bursts, self).step()):
            old = self.kept.pop(delta.response, TokenDelta(delta.response, (), (), None))
            self.kept[delta.response] = TokenDelta(
                delta.response, old.token_ids + delta.token_ids, old.logprobs + delta.logprobs, delta.finish_reason
            )
        given = [response for response in self.kept if (response + self.turn) % 2]
        return [self.kept.pop(response) for response in given or list(self.kept)]


def test_tokens_that_come_in_bursts_are_journalled_and_timed_as_if_they_came_one_by_one():
    store = MemoryStore()
    sessions = [a_session(store, slot, engine=Bursts, flush_interval_s=1.0) for slot in range(SLOTS)]
    for session in sessions:
        live(session)
    assert responses(store) == EXPECTED
    speed = sessions[0].state.rate.per_response(IN_FLIGHT)[IN_FLIGHT]
    assert 0.5 < speed < 1.5  # the scripted engine takes 1 s for a token of each


class Unreachable(MemoryStore):
    """Answers nothing any more once `is_gone`."""

    is_gone = False

    def create(self, key, body):
        self._answer()
        return super().create(key, body)

    def get(self, key, *ranges):
        self._answer()
        return super().get(key, *ranges)

    def _answer(self) -> None:
        if self.is_gone:
            raise StoreUnavailable("no answer")


def test_a_session_that_the_store_ends_says_that_its_engine_is_dead():
    store, health = Unreachable(), EngineHealth()
    member = mortal_session(store, 0, [5, *[0] * 99], restarts_max=100, flush_interval_s=1.0, health=health)
    restart = member.engine.restart

    def gone():
        store.is_gone = True
        member.clock.sleep(2.0)
        restart()

    member.engine.restart = gone
    with pytest.raises(StoreUnavailable):
        live(member)
    assert (health.died, member.engine.dead) == (True, True)
    store.is_gone = False
    # The next session of the process restarts it before anything else.
    again = a_session(store, 0, engine=lambda *_args, **_named: member.engine, health=health, engine_restarts_max=9)
    member.engine.deaths, member.engine.restart, member.engine.calls[:] = [], restart, []
    live(again)
    assert (member.engine.calls[0], health.died) == ("restart", False)
