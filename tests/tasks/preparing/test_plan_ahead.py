"""Planning one iteration ahead: what is sampled from, which prompts are next, and what a restart finds."""

from dataclasses import replace

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.planning_records import PoolObservation
from storage.records.records import ReportRecord
from storage.records.run import acquire_lease, exists, next_iteration, read_plan, release_lease
from storage.stores.memory import MemoryStore
from tasks.plan import plan
from tasks.planning.iteration_plan import BudgetExceeded
from tasks.preparing.iteration import WeightsTooOld, prepare
from tests.committed_runs import publish_version
from tests.small_run import EXECUTION, NEVER_GRADED, config, document, everything, memory_store

URL = "memory://plan-ahead"
AHEAD = {"max_staleness": 1}
ITERATIONS = 3
FIRST_PLAN_WRITES = 8  # earlier deaths: tests/tasks/preparing/test_iteration.py


OBSERVED = PoolObservation(
    pool="rollout", members=2.0, members_at_end=2, machine_s=60.0, losses=0, start_s=5.0, step_s=((1, 0.01), (4, 0.01))
)


class Killed(BaseException):
    """SIGKILL: nothing of the victim runs afterwards."""


class DiesAtWrite(MemoryStore):
    left = 1 << 30

    def create(self, key, body):
        self._count()
        return super().create(key, body)

    def put(self, key, body):
        self._count()
        super().put(key, body)

    def _count(self):
        if self.left == 0:
            self.left = 1 << 30
            raise Killed
        self.left -= 1


@pytest.fixture
def settings(model):
    return config(URL, model, algorithm=AHEAD, rewards=NEVER_GRADED)


@pytest.fixture
def store():
    return memory_store("plan-ahead")


def planned(settings, ahead=0):
    return prepare(settings, EXECUTION, ManualClock(), ahead=ahead)[0]


def commit(store, iteration, **measured):
    last = read_plan(store, iteration)
    report = ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=last.first_prompt + last.num_groups,
        metrics={"cost/usd_run": 0.0} | measured,
        rewards=(),
        lengths=(),
        lives=(),
        train_started_at_s=0,
        train_ended_at_s=0,
        created_at_s=0,
        pools=(OBSERVED,),
    )
    records.put(store, layout.report(iteration), report)


@pytest.mark.slow
def test_while_an_iteration_is_trained_the_next_is_planned_from_the_weights_there_are(store, settings):
    planned(settings)
    reference = planned(settings, 1)
    assert (reference.iteration, reference.weight_version) == (1, 0)
    written = read_plan(store, 1)
    assert (written.iteration, written.weight_version, written.first_prompt) == (1, 0, 4)
    assert next_iteration(store) == 0
    publish_version(store, 1)
    commit(store, 0)
    assert (read_plan(store, 1), planned(settings)) == (written, reference)
    assert planned(settings, 1).weight_version == 1
    assert read_plan(store, 2).first_prompt == 8


def test_where_newer_weights_are_published_already_they_are_taken(store, settings):
    planned(settings)
    publish_version(store, 1)
    assert planned(settings, 1).weight_version == 1


def test_the_first_iteration_of_an_execution_is_on_policy(store, settings):
    planned(settings)
    publish_version(store, 1)
    commit(store, 0)
    reference = planned(settings)
    assert (reference.iteration, reference.weight_version) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_further_ahead_than_allowed_is_refused_and_nothing_is_written(model, store, allowed):
    settings = config(URL, model, algorithm={"max_staleness": allowed})
    for ahead in range(allowed + 1):
        assert planned(settings, ahead).weight_version == 0
    before = everything(store)
    message = (
        f"iteration {allowed + 1}: no weight version from 1 on is published; allowed with algorithm.max_staleness "
        f"{allowed}: {allowed} older than the iteration at most"
    )
    with pytest.raises(WeightsTooOld, match=message):
        planned(settings, allowed + 1)
    assert everything(store) == before
    release_lease(store, EXECUTION)
    with pytest.raises(FlyteRecoverableException, match="no weight version from 1 on is published"):
        plan(config=document(URL, model, algorithm={"max_staleness": allowed}), after=-1, pools=[], ahead=allowed + 1)


def test_an_iteration_without_a_plan_is_not_passed_over(store, settings):
    planned(settings)
    assert planned(settings, 3).iteration == 1
    assert not exists(store, layout.plan(2))


def test_the_task_says_which_iteration_is_to_be_trained_next(store, model):
    given = document(URL, model, algorithm=AHEAD)
    first = plan(config=given, after=-1, pools=["rollout"])
    second = plan(config=given, after=-1, pools=["rollout"], ahead=1)
    assert [each.iteration for each in (first[0], first[2], second[0], second[2])] == [0, 0, 1, 0]
    assert second[2] == first[0]


@pytest.mark.slow
def test_what_is_worked_on_is_brought_to_its_end_before_a_budget_ends_the_run(model, store):
    settings = config(
        URL,
        model,
        algorithm=AHEAD,
        planning={"usd_per_run_max": 3.0},
        pools={"rollout": {"count": 2, "usd_per_hour": 1.0}},
    )
    for ahead in (0, 1):
        planned(settings, ahead)
    publish_version(store, 1)
    commit(store, 0, **{"cost/usd_run": 2.0, "cost/usd_iter": 2.0})
    before = everything(store)
    again, slots = prepare(settings, EXECUTION, ManualClock(), ahead=1)
    assert (again.iteration, again.weight_version, slots) == (1, 0, [[]])
    assert everything(store) == before
    publish_version(store, 2)
    commit(store, 1, **{"cost/usd_run": 4.0, "cost/usd_iter": 2.0})
    for ahead in (1, 0):
        before = everything(store)
        with pytest.raises(BudgetExceeded, match=r"^usd_per_run_max: 3 given, 4 of it spent"):
            planned(settings, ahead)
        assert not [key for key in everything(store).keys() - before.keys() if not key.startswith(layout.LEASE)]
    acquire_lease(store, "whoever is next", 1e9, ManualClock())  # at once: it was given back


def live(store, settings):
    """An execution: every iteration that is not committed, as workflows/training.py orders it on one machine."""
    iteration = planned(settings).iteration
    while iteration < ITERATIONS - 1:
        planned(settings, 1)
        publish_version(store, iteration + 1)
        commit(store, iteration)
        iteration += 1


@pytest.mark.slow
def test_wherever_an_execution_dies_the_next_one_goes_on_with_the_same_plans(settings):
    undisturbed = DiesAtWrite("plan-ahead")
    memory_store("plan-ahead", undisturbed)
    live(undisturbed, settings)
    expected = [read_plan(undisturbed, iteration) for iteration in range(ITERATIONS)]
    assert [each.weight_version for each in expected] == [0, 0, 1]
    assert [each.first_prompt for each in expected] == [0, 4, 8]
    dies = 0
    for number in range(FIRST_PLAN_WRITES, (1 << 30) - undisturbed.left):
        store = memory_store("plan-ahead", DiesAtWrite("plan-ahead"))
        store.left = number
        with pytest.raises(Killed):
            live(store, settings)
        written = {key: body for key, body in everything(store).items() if key.endswith("plan.json")}
        dies += len(written) < ITERATIONS
        live(store, settings)
        assert written.items() <= everything(store).items()
        found = [read_plan(store, iteration) for iteration in range(ITERATIONS)]
        assert [replace(each, nonce="") for each in found] == [replace(each, nonce="") for each in expected]
    assert dies >= 6
