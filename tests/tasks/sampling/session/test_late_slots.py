"""Slots that come when their iteration is closed: they help with the open one of their execution, or leave at once."""

import pytest

from storage.clock import ManualClock, SystemClock
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.run import release_lease
from tasks.preparing.iteration import prepare
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.session.member import generate_slot
from tasks.sampling.session.session_outcome import Preempted
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

pytestmark = pytest.mark.slow

URL = "memory://late-slots"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(model):
    return config(URL, model)


@pytest.fixture
def concluded(settings):
    """A store whose first iteration is concluded."""
    store = memory_store("late-slots")
    plan_iteration(settings)
    roll_out(URL, 0)
    train_small(URL, 0)
    commit_iteration(URL, 0)
    return store


def never_built(*_):
    raise AssertionError("an engine was started for nothing")


def of_iteration(store, iteration):
    return {key: body for key, body in everything(store).items() if key.startswith(layout.iteration(iteration))}


def test_it_helps_with_the_iteration_that_its_execution_has_open(concluded, settings):
    plan_iteration(settings)
    before = of_iteration(concluded, 0)
    outcome = generate_slot(URL, 0, 1, lambda: False, SystemClock(), execution=EXECUTION)
    assert outcome.responses_finished == 12
    [alive] = [records.read(concluded, HeartbeatRecord, key) for key in concluded.list(layout.alive_all(1))]
    # As a member of its own pool, for what it costs, on no slot of the plan.
    assert (alive.pool, alive.slot, alive.incarnation) == ("rollout", 2, outcome.incarnation)
    assert of_iteration(concluded, 0) == before
    train_small(URL, 1)
    assert commit_iteration(URL, 1).lives[0].tokens_kept == outcome.tokens_generated


def test_when_the_execution_is_over_it_leaves_at_once_and_writes_nothing(concluded):
    release_lease(concluded, EXECUTION)
    before = everything(concluded)
    outcome = generate_slot(URL, 0, 1, lambda: False, SystemClock(), never_built, execution=EXECUTION)
    assert (outcome.incarnation, outcome.tokens_generated) == ("", 0)
    assert everything(concluded) == before


def test_it_does_not_work_for_another_execution(concluded, settings):
    release_lease(concluded, EXECUTION)
    prepare(settings, "another", ManualClock())
    before = everything(concluded)
    assert generate_slot(URL, 0, 1, lambda: False, SystemClock(), never_built, execution=EXECUTION).incarnation == ""
    assert everything(concluded) == before


class SkippingClock(SystemClock):
    """Does not sleep; the time has passed all the same. `act` is done when somebody waits at second `at_s`."""

    def __init__(self, at_s=0.0, act=None):
        self.slept_s, self.at_s, self.act = 0.0, at_s, act

    def monotonic(self):
        return super().monotonic() + self.slept_s

    def sleep(self, duration_s):
        self.slept_s += duration_s
        if self.act is not None and self.slept_s >= self.at_s:
            act, self.act = self.act, None
            act()


def test_between_two_iterations_it_waits_for_the_next_plan(model):
    settings = config(URL, model, rollout={"idle_timeout_s": 60.0})
    memory_store("late-slots")
    plan_iteration(settings)
    for slot in (0, 1):
        generate_slot(URL, 0, slot, lambda: False, SystemClock())
    train_small(URL, 0)
    clock = SkippingClock(20.0, lambda: (commit_iteration(URL, 0), plan_iteration(settings)))
    assert generate_slot(URL, 0, 1, lambda: False, clock, execution=EXECUTION).responses_finished == 12


def test_it_waits_no_longer_than_a_member_without_work_does(concluded, model, caplog):
    plan_iteration(config(URL, model, rollout={"idle_timeout_s": 60.0}))
    roll_out(URL, 1)
    train_small(URL, 1)
    clock = SkippingClock()
    outcome = generate_slot(URL, 1, 1, lambda: False, clock, never_built, execution=EXECUTION)
    assert outcome.incarnation == ""
    assert 59 <= clock.slept_s <= 61
    told = [record.getMessage() for record in caplog.records if record.name == "storage.waiting"]
    assert told[0].startswith("waiting for the plan after iteration 1, which is closed, since ")
    assert told[0].endswith("; then this member leaves (rollout.idle_timeout_s)")


def test_a_notice_ends_the_wait(model):
    memory_store("late-slots")
    plan_iteration(config(URL, model, rollout={"idle_timeout_s": 60.0}))
    for slot in (0, 1):
        generate_slot(URL, 0, slot, lambda: False, SystemClock())
    train_small(URL, 0)
    with pytest.raises(Preempted):
        generate_slot(URL, 0, 1, lambda: True, SystemClock(), never_built, execution=EXECUTION)


def test_when_the_iteration_is_closed_while_the_engine_starts_it_helps_with_the_next(settings):
    memory_store("late-slots")
    plan_iteration(settings)
    built = []

    def build(rollout, folder, vocab_size):
        if not built:
            built.append(True)
            roll_out(URL, 0)
            train_small(URL, 0)
            commit_iteration(URL, 0)
            plan_iteration(settings)
        return build_engine(rollout, folder, vocab_size)

    assert generate_slot(URL, 0, 1, lambda: False, SystemClock(), build, execution=EXECUTION).responses_finished == 12


def test_an_engine_that_dies_is_told_from_one_that_was_not_needed(concluded, settings):
    plan_iteration(settings)

    def dies(*_):
        raise EngineDied("no GPU")

    with pytest.raises(EngineDied):
        generate_slot(URL, 0, 1, lambda: False, SystemClock(), dies, execution=EXECUTION)
