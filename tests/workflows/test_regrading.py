"""The workflow `regrading`: the values and words of `gleaner regrade`, on the pool that the rewards need."""

import time
from collections import OrderedDict
from pathlib import Path

import pytest
import yaml
from flytekit import current_context
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.tools.translator import get_serializable

from resources.process import descendants
from storage.records import layout
from storage.records.gradings import read_graded
from storage.records.run import count_committed
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreUnavailable
from tasks.configuration.run_config import dump
from tasks.regrade import regrade
from tests.processes import are_gone, wait_until
from tests.regraded_run import REWARDS, as_recorded, bits, differences, grades, holding, trained
from tests.small_run import Unreachable, config, document, everything, memory_store, model_directory
from tests.whole_runs import ended, pyflyte, run_here
from tests.workflows.test_iteration import CONFIG, CPU, GPU, SETTINGS, dispatched, quantities
from workflows.regrading import regrade_run, regrading

URL = "memory://regrading-task"
BOTH = range(2)
JUDGE = {"function": "reward_model", "model": "/models/judge"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def objects(policy):
    return trained("regrading-task", policy, 2, rewards=REWARDS)


@pytest.fixture
def own(policy):
    """The run's own configuration."""
    return dump(config(URL, policy, rewards=REWARDS))


def on_disk(objects, folder: Path) -> str:
    """The url of a copy of the run, for other processes."""
    store = connect(str(folder / "run"))
    for key, body in objects.items():
        store.put(key, body)
    return store.url


@pytest.mark.slow
def test_the_runs_own_rewards_come_to_the_recorded_values_and_the_deck_shows_the_table(objects, own):
    store = holding(objects, "regrading-task")
    change = regrade(config=own, grading="again", iterations="1:")
    assert grades(store, "again", range(1, 2)) == [bits(as_recorded(store, 1))]
    assert (change.grading, change.iterations, change.responses, change.reward.changed) == ("again", (1,), 12, 0)
    assert list(differences(objects, store, "again")) == []
    [shown] = [deck.html for deck in current_context().decks if deck.name == "Grading"]
    text = str(change)
    assert "grading again, iteration 1" in text
    assert text.splitlines()[-2].startswith("groups with a signal: ")
    assert all(line.rstrip() in shown for line in text.splitlines())


@pytest.mark.slow
def test_a_workflow_on_this_machine_prints_the_table_and_refuses_in_words(objects, policy, tmp_path):
    url = on_disk(objects, tmp_path)
    file = tmp_path / "rubric.yaml"
    file.write_text(yaml.safe_dump(document("memory://nowhere", policy, rewards=REWARDS[-1:])))
    given = ("--config", f'["{file}", "run.url={url}"]')
    told = run_here("regrading", *given, "--grading", "rubric")
    assert "grading rubric, iterations 0 to 1" in told
    assert "groups with a signal: " in told
    assert [len(read_graded(connect(url), "rubric", each).responses) for each in BOTH] == [12, 12]
    before = everything(connect(url))
    for more, refusal in [
        (("--grading", "rubric", "--iterations", "2"), "iterations: value '2'; allowed: the run has 0 to 1"),
        (("--grading", "../rubric"), "name: value '../rubric'; allowed: up to 100 letters"),
    ]:
        assert refusal in run_here("regrading", *given, *more, code=1)
    assert everything(connect(url)) == before


@pytest.mark.slow
def test_a_killed_task_goes_on_behind_the_last_graded_iteration(objects, policy, tmp_path):
    url, notes = on_disk(objects, tmp_path), tmp_path / "notes"
    store = connect(url)
    first, second = (len(store.list(layout.batches(iteration))) for iteration in BOTH)
    reward = {"function": "tests.reward_functions:stopping_at", "arguments": {"file": str(notes), "call": first}}
    file = tmp_path / "stopping.yaml"
    file.write_text(yaml.safe_dump(document(url, policy, rewards=[reward | {"time_limit_s": 600.0}])))
    command = ("regrading", "--config", str(file), "--grading", "late")
    child = pyflyte(*command)
    try:
        while not notes.exists() or notes.read_text().count("\n") <= first:
            assert child.poll() is None
            time.sleep(0.02)
        processes = descendants(child.pid)
    finally:
        child.kill()
    ended(child, code=-9)
    assert processes
    wait_until(lambda: are_gone(processes))
    assert store.list(layout.GRADINGS) == [layout.graded("late", 0), layout.grading("late")]
    done = store.get(layout.graded("late", 0))
    Path(f"{notes}.go").touch()
    assert "grading late, iterations 0 to 1" in run_here(*command)
    assert notes.read_text().count("\n") == first + 1 + second
    assert store.get(layout.graded("late", 0)) == done
    assert read_graded(store, "late", 1).responses == tuple(range(12))


class RefusesOnce(MemoryStore):
    """A store that does not take the first object under a key."""

    def __init__(self, objects, key: str) -> None:
        super().__init__("regrading-task")
        self._objects.update(objects)
        self.refused = key
        self.graded: list[str] = []

    def create(self, key: str, body: bytes) -> bool:
        if key == self.refused:
            self.refused = ""
            raise StoreUnavailable(f"no answer for {key}")
        self.graded += [key] * (key != layout.grading("again"))
        return super().create(key, body)


@pytest.mark.slow
def test_flyte_tries_again_if_the_store_does_not_answer_and_no_iteration_is_graded_twice(objects, own):
    store = RefusesOnce(objects, layout.graded("again", 1))
    memory_store("regrading-task", store)
    with pytest.raises(FlyteRecoverableException, match=r"no answer for gradings/again/000001"):
        regrade(config=own, grading="again", iterations=":")
    assert store.graded == [layout.graded("again", 0)]
    regrade(config=own, grading="again", iterations=":")
    assert store.graded == [layout.graded("again", iteration) for iteration in BOTH]
    assert grades(store, "again", BOTH) == [bits(as_recorded(store, iteration)) for iteration in BOTH]


def test_a_store_that_never_answers_is_tried_again(own):
    memory_store("regrading-task", Unreachable("regrading-task"))
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        regrade(config=own, grading="again", iterations=":")


@pytest.mark.slow
def test_a_run_without_a_committed_iteration_is_no_matter_of_another_attempt(objects, own):
    store = holding({key: body for key, body in objects.items() if not key.endswith("report.json")}, "regrading-task")
    assert count_committed(store) == 0
    with pytest.raises(LookupError, match="holds no committed iteration; allowed: a run with one"):
        regrade(config=own, grading="again", iterations=":")


# What a cluster is told.


@pytest.mark.parametrize(("rewards", "pool"), [(CONFIG["rewards"], "control"), ([JUDGE], "train")])
def test_the_pool_is_the_one_that_the_rewards_need(rewards, pool):
    [node] = dispatched(
        regrade_run, config=CONFIG | {"rewards": rewards}, grading="rubric", iterations="3:9", code="c"
    ).nodes
    told = node.to_flyte_idl()
    asked = quantities(told.task_node.overrides.resources.requests)
    assert asked[CPU] == CONFIG["pools"][pool]["cpu"]
    assert asked.get(GPU) == ({"control": None, "train": "8"}[pool])
    assert told.metadata.retries.retries == CONFIG["pools"][pool]["retries"]
    assert not told.metadata.interruptible
    assert told.metadata.name == "regrade"
    given = {each.var: each.binding.scalar.primitive.string_value for each in told.inputs if each.var != "config"}
    assert given == {"grading": "rubric", "iterations": "3:9", "code": "c"}


@pytest.mark.parametrize("entity", [regrading, regrade_run, regrade])
def test_no_input_or_output_travels_as_a_pickle(entity):
    interface = get_serializable(OrderedDict(), SETTINGS, entity).template.interface
    assert "Pickle" not in str(interface.to_flyte_idl())
    assert list(interface.outputs) == ["o0"]
