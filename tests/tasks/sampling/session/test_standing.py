"""Members that stand: one process works on all iterations of an execution, and keeps engine and weights warm."""

import threading
from dataclasses import replace

import pytest

from resources.pools import PoolsConfig, RolloutPoolConfig
from storage.clock import SystemClock
from storage.journal.assembly import JournalReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import TRAIN_POOL, ClaimRecord, ClosedRecord, SettingsRecord
from storage.records.run import read_plan, read_report, release_lease
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.history.planning_inputs import pool_capacities
from tasks.preparing.iteration import prepare
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.patched_weights import PatchedWeights
from tasks.sampling.session.route import Route
from tasks.sampling.session.session_outcome import Preempted
from tasks.sampling.session.standing import Post, pool_of, slot_in, stand
from tests.processes import wait_until
from tests.small_run import (
    EXECUTION,
    commit_iteration,
    config,
    everything,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

URL = "memory://standing"
QUICK = {
    "crew": "standing",
    "flush_interval_s": 0.05,
    "claim_ttl_s": 0.5,
    "idle_timeout_s": 5.0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model):
    memory_store("standing")
    return config(URL, model, rollout=QUICK)


@pytest.fixture
def ahead(model):
    """A run whose iterations 0 and 1 are planned, both to be sampled from weight version 0."""
    memory_store("standing")
    settings = config(URL, model, rollout=QUICK, algorithm={"max_staleness": 1})
    plan_iteration(settings)
    prepare(settings, EXECUTION, SystemClock(), ahead=1)
    return settings


class Engines:
    """Builds engines and remembers which weights each was given, and for which base. dies: in its k-th step, once."""

    def __init__(self, dies=0):
        self.loaded = []
        self.bases = set()
        self.dies = dies

    def __call__(self, *given):
        remembered, versions = self, []
        self.loaded.append(versions)
        engine = build_engine(*given)

        class Remembering:
            def load_weights(self, version, tensors):
                versions.append(version)
                remembered.bases.add((version, tensors.base if isinstance(tensors, PatchedWeights) else None))
                engine.load_weights(version, tensors)

            def step(self):
                remembered.dies -= 1
                if remembered.dies == 0:
                    raise EngineDied("CUDA error: unspecified launch failure")
                return engine.step()

            def __getattr__(self, name):
                return getattr(engine, name)

        return Remembering()


class Members:
    """Standing members in threads of this process."""

    def __init__(self, slots, iterations, build=build_engine):
        self.outcomes, self.errors, self.noticed = {}, {}, set()
        post = Post(run_url=URL, execution=EXECUTION, slot=0, first=0, iterations=iterations)

        def live(slot):
            try:
                self.outcomes[slot] = stand(
                    replace(post, slot=slot), lambda: slot in self.noticed, SystemClock(), build
                )
            except Exception as error:  # noqa: BLE001 - the test asks for it
                self.errors[slot] = error

        self.threads = [threading.Thread(target=live, args=(slot,), daemon=True) for slot in slots]
        for thread in self.threads:
            thread.start()

    def until(self, condition):
        """Wait, as long as no member has failed."""
        wait_until(lambda: self.errors or condition())
        assert not self.errors

    def join(self):
        for thread in self.threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in self.threads)


def store():
    return connect(URL)


def all_ended(iteration):
    plan = read_plan(store(), iteration)
    reader = JournalReader(store(), plan)
    reader.refresh()
    return all(reader.assemble(response).finish.ends_response for response in range(plan.num_responses))


def lives(iteration):
    return [records.read(store(), HeartbeatRecord, key) for key in store().list(layout.alive_all(iteration))]


def close(iteration):
    records.commit(store(), layout.closed(iteration), ClosedRecord(iteration=iteration, reason="trained"))


@pytest.mark.slow
def test_members_go_from_iteration_to_iteration_with_one_engine_and_leave_behind_the_last(settings):
    plan_iteration(settings)
    engines = Engines()
    members = Members((0, 1), 2, engines)
    # One of them alone may have generated everything before the other one is there.
    members.until(lambda: len(lives(0)) == 2)
    train_small(URL, 0)
    commit_iteration(URL, 0)
    # They stand by with the weights that the next plan will name.
    members.until(lambda: all(versions and versions[-1] == 1 for versions in engines.loaded))
    assert not store().list(layout.alive_all(1))
    plan_iteration(settings)
    members.until(lambda: len(lives(1)) == 2)
    train_small(URL, 1)
    members.join()
    assert engines.loaded == [[0, 1], [0, 1]]
    assert engines.bases == {(0, None), (1, 0)}
    assert not members.errors
    assert sum(outcome.responses_finished for outcome in members.outcomes.values()) >= 24
    assert all_ended(0)
    assert all_ended(1)
    for slot in (0, 1):
        [first], [second] = ([each for each in lives(n) if each.slot == slot] for n in (0, 1))
        assert first.state == second.state == "gone"
        assert (first.pool, second.pool) == ("rollout", "rollout")
        assert second.started_at_s >= first.updated_at_s  # no second is paid for twice
        assert second.started_at_s - first.updated_at_s < 5  # nor is one of standing by left out


def test_with_staleness_a_member_goes_on_when_it_has_no_work_and_waits_in_the_oldest_open_iteration(ahead):
    members = Members((0, 1), 3)
    members.until(lambda: all_ended(0) and all_ended(1))
    # Nothing is closed: both iterations have ended, and the members wait where the trainer is.
    members.until(lambda: {each.slot for each in lives(0) if each.state != "gone"} == {0, 1})
    assert all(each.state == "gone" for each in lives(1))
    close(0)
    members.until(lambda: {each.slot for each in lives(1) if each.state != "gone"} == {0, 1})
    close(1)
    release_lease(store(), EXECUTION)
    members.join()
    assert not members.errors


def test_in_the_last_iteration_a_member_leaves_before_anything_is_closed(ahead):
    members = Members((0, 1), 2)
    members.join()
    assert not members.errors
    assert all_ended(0)
    assert all_ended(1)
    assert {each.state for iteration in (0, 1) for each in lives(iteration)} == {"gone"}


@pytest.mark.slow
def test_members_that_went_on_are_not_missing_from_the_iteration_that_they_left(ahead):
    """Else the next plan would expect fewer machines than there are."""
    members = Members((0, 1), 2)
    members.until(lambda: all_ended(0) and all_ended(1) and len(lives(1)) >= 2)
    train_small(URL, 0)
    (seen,) = commit_iteration(URL, 0).pools
    assert (seen.members_at_end, seen.losses) == (2, 0)
    (pool,) = pool_capacities(ahead, [read_report(store(), 0)], read_plan(store(), 0))
    assert (pool.available, pool.machines_present) == (None, 2)
    close(1)
    members.join()
    assert not members.errors


def test_what_a_lost_member_held_is_finished_by_one_that_had_gone_on(ahead):
    ghost = ClaimRecord(unit=1, epoch=1, incarnation="00001-0123456789abcdef", slot=1, responses=None, sealed={})
    records.commit(store(), layout.claim(0, 1, 1), ghost)
    members = Members((0,), 2)
    members.until(lambda: all_ended(0) and all_ended(1))
    close(0)
    close(1)
    members.join()
    assert members.outcomes[0].responses_finished == 24
    assert len(lives(0)) == 2  # before it went on, and when it came back


@pytest.mark.slow
def test_a_notice_while_it_works_or_stands_by_ends_it_without_loss(settings):
    plan_iteration(settings)
    members = Members((0,), 2)
    members.until(lambda: all_ended(0))
    close(0)
    members.until(lambda: all(each.state == "gone" for each in lives(0)))
    members.noticed.add(0)
    members.join()
    assert isinstance(members.errors[0], Preempted)

    memory_store("standing")
    plan_iteration(settings)
    members = Members((0,), 2)
    members.noticed.add(0)
    members.join()
    assert isinstance(members.errors[0], Preempted)
    again = Members((0, 1), 1)
    again.until(lambda: all_ended(0))
    close(0)
    again.join()
    assert not again.errors


def test_it_leaves_when_its_execution_has_ended(settings):
    plan_iteration(settings)
    members = Members((0, 1), 9)
    members.until(lambda: all_ended(0))
    release_lease(store(), EXECUTION)
    close(0)
    members.join()
    assert not members.errors


def test_an_engine_that_died_is_restarted_and_given_its_weights_again(ahead):
    engines = Engines(dies=3)
    members = Members((0, 1), 2, engines)
    members.until(lambda: all_ended(0) and all_ended(1))
    close(0)
    close(1)
    members.join()
    assert not members.errors
    # Both iterations name version 0. The other member may have come too late for any work.
    assert sorted(engines.loaded) in ([[0], [0, 0]], [[], [0, 0]])


def test_a_store_that_fails_for_a_moment_does_not_end_it(settings):
    plan_iteration(settings)

    class Failing(MemoryStore):
        failures = 0

        def get(self, key, start=0, end=None):
            if key == layout.plan(1) and self.failures < 3:
                self.failures += 1
                raise StoreUnavailable("no answer")
            return super().get(key, start, end)

    failing = Failing()
    for key, body in everything(store()).items():
        failing.put(key, body)
    memory_store("standing", failing)
    members = Members((0, 1), 2)
    members.until(lambda: all_ended(0) and failing.failures == 3)
    release_lease(failing, EXECUTION)
    close(0)
    members.join()
    assert not members.errors


@pytest.fixture
def route(ahead):
    return Route(store(), EXECUTION, 0, 2)


def at(plan):
    return None if plan is None else plan.iteration


def test_a_route_goes_forward_and_then_back_to_the_oldest_open_iteration(route):
    assert at(route.next()) == 0
    route.enter(0)
    assert at(route.next()) == 1
    assert route.leads_away(0)
    route.enter(1)
    assert at(route.next()) == 0
    assert route.leads_away(1)
    route.enter(0)
    assert not route.leads_away(0)
    close(0)
    assert at(route.next()) == 1
    close(1)
    assert at(route.next()) is None
    assert not route.leaves(1)
    assert not route.is_over
    assert not route.is_given_up()
    assert route.newer_weights(None) == 0
    assert route.newer_weights(0) is None
    close(2)
    assert at(route.next()) is None
    assert route.is_over


def test_after_the_last_iteration_a_route_leaves_the_open_ones_from_the_oldest_on(ahead):
    route = Route(store(), EXECUTION, 0, 1)
    route.enter(0)
    assert at(route.next()) == 1
    assert not route.leaves(0)
    route.enter(1)
    assert at(route.next()) == 0
    assert route.leads_away(1)
    assert not route.leaves(1)
    assert route.leaves(0)
    route.leave(0)
    assert at(route.next()) == 1
    assert route.leaves(1)
    route.leave(1)
    assert at(route.next()) is None
    assert route.is_over


def test_a_member_that_comes_late_begins_with_the_oldest_open_iteration(route):
    close(0)
    assert at(route.next()) == 1


def test_a_route_leaves_iterations_out_that_another_execution_works_on(route):
    other = records.read(store(), SettingsRecord, layout.settings(1))
    records.put(store(), layout.settings(1), replace(other, execution="another"))
    route.enter(0)
    assert at(route.next()) == 0
    assert not route.leads_away(0)


def test_a_member_needs_first_what_the_next_plan_names_and_else_the_newest_weights(settings):
    """A slot that is lost in a later iteration begins again with those, and not with what the first plan named."""
    plan_iteration(settings)

    def needed():
        return Route(store(), EXECUTION, 0, 2).first_weights()

    assert needed() == 0
    roll_out(URL, 0)
    train_small(URL, 0)
    commit_iteration(URL, 0)
    assert needed() == 1
    plan_iteration(settings)
    assert needed() == 1


def test_a_number_that_is_no_slot_of_the_crew_helps(ahead):
    plan = read_plan(store(), 0)
    assert [slot_in(store(), plan, slot) for slot in (0, 1, 2, 7)] == [0, 1, 2, 2]
    trainers = replace(plan, slots=(plan.slots[0], replace(plan.slots[1], pool=TRAIN_POOL)))
    assert slot_in(store(), trainers, 1) == 2


def test_slots_of_a_standing_crew_are_numbered_pool_by_pool():
    more = {"other": RolloutPoolConfig(count=1)}
    pools = PoolsConfig(rollout=RolloutPoolConfig(count=3), more_rollout=more)
    assert pools.standing_slots == {"rollout": [0, 1, 2], "other": [3]}
    assert [pool_of(pools, slot) for slot in (0, 2, 3, 9)] == ["rollout", "rollout", "other", "rollout"]
