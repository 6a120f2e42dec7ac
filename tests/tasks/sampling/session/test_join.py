"""A machine that joins a run: takes free work, goes on with the next iteration, leaves without loss."""

import re
import threading
import time
from dataclasses import replace

import pytest

from storage.clock import ManualClock, SystemClock
from storage.journal.assembly import JournalReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import JOINED_POOL, ClosedRecord
from storage.records.run import read_plan, read_run
from storage.stores.connect import connect
from storage.stores.store import ConflictingRecord, StoreUnavailable
from tasks.configuration.run_config import dump, parse
from tasks.preparing.iteration import prepare
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.session.join import BEGINS_S, JoinLimits, join_run
from tests.processes import wait_until
from tests.small_run import (
    EXECUTION,
    Unreachable,
    commit_iteration,
    config,
    everything,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

URL = "memory://join"
ONCE = JoinLimits(iterations=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model):
    memory_store("join")
    return config(URL, model, rollout={"flush_interval_s": 0.05, "claim_ttl_s": 0.5})


def store():
    return connect(URL)


def join(limits=ONCE, notice=lambda: False, **given):
    return join_run(URL, limits, notice, SystemClock(), **given)


def all_ended() -> bool:
    plan = read_plan(store(), 0)
    reader = JournalReader(store(), plan)
    reader.refresh()
    return all(reader.assemble(response).finish.ends_response for response in range(plan.num_responses))


def beats(iteration=0):
    return [records.read(store(), HeartbeatRecord, key) for key in store().list(layout.alive_all(iteration))]


class BoundedClock(ManualClock):
    """A clock on which a wait without an end is an error."""

    sleeps = 0

    def sleep(self, duration_s):
        super().sleep(duration_s)
        self.sleeps += 1
        assert self.sleeps < 50_000, "it waits for ever"


@pytest.mark.slow
def test_alone_it_does_everything_and_the_report_counts_what_it_cost(settings):
    plan_iteration(settings)
    told = []
    assert join(usd_per_hour=7.2, report=lambda plan, outcome: told.append((plan.iteration, outcome))) == 1
    assert all_ended()
    [(iteration, outcome)] = told
    assert (iteration, outcome.responses_finished) == (0, 12)
    [alive] = beats()
    assert (alive.pool, alive.slot, alive.state, alive.usd_per_hour) == (JOINED_POOL, 2, "gone", 7.2)
    train_small(URL, 0)
    report = commit_iteration(URL, 0)
    seconds = report.metrics["timing_s/rollout_machines"]
    assert report.metrics["cost/usd_rollout"] == pytest.approx(7.2 * seconds / 3600)


@pytest.fixture
def ahead(model):
    """A run whose iterations 0 and 1 are planned, both to be sampled from weight version 0."""
    memory_store("join")
    settings = config(URL, model, algorithm={"max_staleness": 1}, rollout={"flush_interval_s": 0.05})
    plan_iteration(settings)
    prepare(settings, EXECUTION, ManualClock(), ahead=1)
    return settings


def visits(limits, notice=lambda: False, **given):
    """The iterations of a member's sessions, with the responses that it ended in each."""
    told = []

    def report(plan, outcome):
        told.append((plan.iteration, outcome.responses_finished))

    join_run(URL, limits, notice, SystemClock(), report=report, **given)
    return told


@pytest.mark.slow
def test_where_two_iterations_are_planned_it_goes_on_when_it_has_no_work_and_then_waits_in_the_oldest(ahead):
    noticed = threading.Event()

    def leave_when_it_is_back():
        wait_until(lambda: len(beats(0)) == 2)
        noticed.set()

    other = threading.Thread(target=leave_when_it_is_back)
    other.start()
    # Nothing is closed. The visit that the notice ends is not told.
    assert visits(JoinLimits(), notice=noticed.is_set) == [(0, 12), (1, 12)]
    other.join()
    assert visits(JoinLimits(iterations=2)) == [(0, 0), (1, 0)]


def test_where_the_next_iteration_closes_as_it_goes_there_it_returns_to_the_one_that_is_open(ahead):
    def report(*_):
        records.commit(store(), layout.closed(1), ClosedRecord(iteration=1, reason="a test", nonce="a"))

    ends_s = time.monotonic() + 20
    join(JoinLimits(), lambda: len(beats(0)) == 2 or time.monotonic() > ends_s, report=report)
    assert len(beats(0)) == 2


@pytest.mark.slow
def test_where_two_iterations_are_planned_it_leaves_in_time_and_when_it_has_no_work(ahead):
    assert visits(JoinLimits(patience_s=0.5)) == [(0, 12), (1, 12), (0, 0)]
    memory_store("join")
    plan_iteration(ahead)

    def slow(settings, _, vocab_size):
        return ScriptedEngine(
            *(vocab_size, settings.max_responses_in_flight), clock=SystemClock(), step_time_s=lambda _: 0.2
        )

    began_s = time.monotonic()
    [(iteration, _)] = visits(JoinLimits(time_limit_s=1.0), build=slow)
    assert iteration == 0
    assert time.monotonic() - began_s < 6
    assert not all_ended()


@pytest.mark.slow
def test_it_waits_for_a_plan_and_goes_on_with_the_next_iteration(settings):
    plan_iteration(settings)
    plan = store().get(layout.plan(0))
    store().delete(layout.plan(0))
    helped, told = [], []
    joined = threading.Thread(
        target=lambda: helped.append(
            join(JoinLimits(iterations=2), report=lambda plan, outcome: told.append((plan.iteration, outcome)))
        )
    )
    joined.start()
    store().create(layout.plan(0), plan)
    train_small(URL, 0)
    commit_iteration(URL, 0)
    plan_iteration(settings)
    train_small(URL, 1)
    joined.join(300)
    assert helped == [2]
    assert [(iteration, outcome.responses_finished) for iteration, outcome in told] == [(0, 12), (1, 12)]
    lives = beats(1)
    assert lives[0].started_at_s >= beats(0)[0].updated_at_s  # no second is paid for twice


def test_two_machines_that_join_at_once_share_and_finish(settings):
    plan_iteration(settings)
    machines = [threading.Thread(target=join) for _ in range(2)]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join(300)
    assert all_ended()


@pytest.mark.slow
def test_told_to_leave_it_leaves_its_tokens_to_the_crew(settings):
    plan_iteration(settings)
    calls = iter(range(10_000))
    assert join(notice=lambda: next(calls) > 12) == 1
    [alive] = beats()
    assert (alive.state, alive.unfinished > 0) == ("gone", True)
    roll_out(URL, 0)
    assert all_ended()
    train_small(URL, 0)
    assert commit_iteration(URL, 0).metrics["balance/responses_moved"] > 0


class Dies(ScriptedEngine):
    """Does `before` in its k-th step and dies of it."""

    def __init__(self, config, vocab_size, before, steps):
        super().__init__(vocab_size, config.max_responses_in_flight)
        self.before, self.steps, self.restarts = before, steps, 0

    def step(self):
        self.steps -= 1
        if self.steps == 0:
            self.before()
            raise EngineDied("CUDA error: unspecified launch failure")
        return super().step()

    def restart(self):
        self.restarts += 1
        super().restart()


@pytest.mark.slow
def test_an_engine_that_dies_for_good_leaves_its_tokens_to_the_crew(model, monkeypatch):
    monkeypatch.setattr("tasks.sampling.session.member.ENGINE_RESTARTS_MAX", 0)
    memory_store("join")
    plan_iteration(config(URL, model))
    with pytest.raises(EngineDied, match="0 of 0 restarts tried: CUDA error"):
        join(build=lambda config, _, vocab_size: Dies(config, vocab_size, lambda: None, 5))
    [alive] = beats()
    assert (alive.state, alive.unfinished > 0, alive.tokens_generated) == ("gone", True, 4 * 12)
    roll_out(URL, 0)
    assert all_ended()
    train_small(URL, 0)
    assert commit_iteration(URL, 0).metrics["resume/tokens_recovered"] == alive.tokens_generated


@pytest.mark.slow
def test_an_engine_that_is_dead_when_the_iteration_is_closed_is_restarted_for_the_next(settings):
    plan_iteration(settings)
    engines = []

    def others_finish():
        roll_out(URL, 0)
        train_small(URL, 0)
        commit_iteration(URL, 0)
        plan_iteration(settings)
        time.sleep(0.5)  # ten flushes, at which it learns that the iteration is closed

    def build(config, _, vocab_size):
        engines.append(Dies(config, vocab_size, others_finish, 3))
        return engines[0]

    assert join(JoinLimits(iterations=2), build=build) == 2
    assert engines[0].restarts == 1
    assert [alive.responses_finished for alive in beats(1)] == [12]


@pytest.mark.slow
def test_it_leaves_in_time_and_when_nothing_is_planned(settings):
    plan_iteration(settings)
    roll_out(URL, 0)
    train_small(URL, 0)
    clock = BoundedClock()
    assert join_run(URL, JoinLimits(patience_s=30.0), lambda: False, clock) == 0
    assert 30 <= clock.monotonic() < 40
    assert join_run(URL, JoinLimits(time_limit_s=5.0), lambda: False, clock) == 0
    assert join_run(URL, JoinLimits(), lambda: True, clock) == 0


@pytest.mark.slow
def test_it_waits_for_a_run_to_begin_and_says_so_once(settings, caplog):
    helped = []
    joined = threading.Thread(target=lambda: helped.append(join()))
    joined.start()
    deadline_s = time.monotonic() + 300
    while not caplog.records:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    plan_iteration(settings)
    joined.join(300)
    assert helped == [1]
    assert all_ended()
    [told] = [record.getMessage() for record in caplog.records if record.name == "storage.waiting"]
    assert told.startswith(f"waiting for a run to begin at {URL}, which holds no run.json yet, since ")
    assert told.endswith(" UTC; then this machine leaves (--patience-s)")


def test_it_does_not_wait_for_ever_for_a_run_to_begin():
    memory_store("join")
    clock = BoundedClock()
    assert join_run(URL, JoinLimits(patience_s=30.0), lambda: False, clock) == 0
    assert 30 <= clock.monotonic() < 40
    assert join_run(URL, JoinLimits(time_limit_s=5.0, patience_s=30.0), lambda: False, clock) == 0
    assert 35 <= clock.monotonic() < 45
    calls = iter(range(100))
    assert join_run(URL, JoinLimits(), lambda: next(calls) > 3, clock) == 0
    began_s = clock.monotonic()
    assert join_run(URL, JoinLimits(), lambda: False, clock) == 0
    assert clock.monotonic() - began_s == BEGINS_S


class Beats(BoundedClock):
    """A clock on which whoever holds the lease beats every 100 s, for 500 s."""

    def sleep(self, duration_s):
        super().sleep(duration_s)
        if self.monotonic() < 500:
            store().put(layout.LEASE_BEAT, str(int(self.monotonic() / 100)).encode())


def test_when_all_responses_are_there_it_waits_for_the_next_plan_as_long_as_somebody_advances_the_run(model, caplog):
    memory_store("join")
    plan_iteration(config(URL, model, run={"lease_ttl_s": 300.0}))
    roll_out(URL, 0)
    records.commit(store(), layout.closed(0), ClosedRecord(iteration=0, reason="trained"))
    clock = Beats()
    assert join_run(URL, JoinLimits(), lambda: False, clock) == 0
    # The last beat but one came at 400 s, and those after it were the same.
    assert 690 <= clock.monotonic() <= 720
    told = [record.getMessage() for record in caplog.records if record.name == "storage.waiting"]
    assert told[0].startswith(f"waiting for the next iteration of {URL} to be planned, since 1970-01-01 00:00:00 UTC ")
    assert told[0].endswith("; unless the run shows a sign of life before, this machine leaves (--patience-s)")
    # The first after 10 s, and then one a minute.
    assert 10 <= len(told) <= 13


def test_a_store_that_does_not_answer_is_not_waited_for():
    memory_store("join", Unreachable())
    with pytest.raises(StoreUnavailable, match="no answer"):
        join()


def with_turns(settings, **turns):
    """The run with a section `turns`, planned."""
    plan_iteration(settings)
    for key, record in ((layout.RUN, read_run(store())), (layout.plan(0), read_plan(store(), 0))):
        whole = dump(parse({**record.config, "turns": turns}))
        records.put(store(), key, replace(record, config=whole))


def test_it_says_what_runs_here(settings):
    plan_iteration(settings)
    told = []
    join(notice=lambda: False, tell=told.append)
    assert told == ["here run: the engine 'scripted'; functions: none that the run names"]


@pytest.mark.parametrize(
    ("turns", "allowed", "refused"),
    [
        ({"tools": ["mine:a", "mine:b", "yours.pack:c"]}, (), ("mine:a, mine:b, yours.pack:c", "mine", "yours.pack")),
        ({"tools": ["mine:a", "mine:b", "yours.pack:c"]}, ("mine",), ("yours.pack:c", "yours.pack")),
        ({"tools": ["mine:a", "mine:b"]}, ("mine:b",), ("mine:a", "mine")),
        ({"tools": ["mine:a.b"]}, ("mine:a",), ("mine:a.b", "mine")),
        ({"environment": "mine.pack:Env"}, ("mine", "min", "mine.pac", "mine.packs"), ("mine.pack:Env", "mine.pack")),
        ({"agent": "os:system"}, (), ("os:system", "os")),
    ],
)
def test_functions_that_were_not_allowed_are_refused_by_name_before_anything_runs(settings, turns, allowed, refused):
    with_turns(settings, **turns)
    before = everything(store())
    named, *modules = refused
    asked = " ".join(f"--run-tools {module}" for module in modules)
    line = f"turns: the run names {named}, which would run on this machine; allowed: a run without turns, or {asked} "
    with pytest.raises(ValueError, match=f"^{re.escape(line)}"):
        join(run_tools=allowed, build=lambda *_: pytest.fail("an engine is started"))
    assert everything(store()) == before


@pytest.mark.parametrize("allowed", [("tests.tool_functions",), ("tests.tool_functions:add", "another")])
def test_functions_that_were_allowed_run_and_are_named(settings, allowed):
    with_turns(settings, tools=["tests.tool_functions:add"], environment_variables=["HF_TOKEN"])
    told, calls = [], iter(range(10_000))
    assert join(run_tools=allowed, notice=lambda: next(calls) > 2, tell=told.append) == 1
    assert told == ["here run: the engine 'scripted'; functions: tests.tool_functions:add; they see HF_TOKEN"]


@pytest.mark.parametrize("value", ["", "a b", "a:", ":f", "a.:f", "../a", "a:b:c", "*"])
def test_what_names_no_module_is_refused(settings, value):
    plan_iteration(settings)
    with pytest.raises(
        ValueError, match=rf"^--run-tools: value {re.escape(repr(value))}; allowed: package\.module, or"
    ):
        join(run_tools=(value,))


def test_what_runs_is_the_runs_even_if_a_plan_says_otherwise(settings):
    plan_iteration(settings)
    plan = read_plan(store(), 0)
    whole = dump(parse({**plan.config, "turns": {"tools": ["tests.tool_functions:add"]}}))
    records.put(store(), layout.plan(0), replace(plan, config=whole))
    with pytest.raises(ConflictingRecord, match="turns"):
        join(run_tools=("tests.tool_functions",))
