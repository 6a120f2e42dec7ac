"""Leaves of an execution: whatever becomes of them, the nodes that carry the run on go on, and the end tells of it."""

import functools
from collections import OrderedDict

import pytest
import yaml
from flytekit import task, workflow
from flytekit.core.array_node_map_task import ArrayNodeMapTaskResolver
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.tools.translator import get_serializable

from resources.pools import PoolsConfig
from storage.records import layout
from storage.records.evaluations import evaluations
from storage.records.failures import last_failures
from storage.records.run import next_iteration
from storage.stores.connect import connect
from tasks.configuration.references import EvaluationOutcome, IterationOutcome
from tasks.evaluate import evaluate
from tasks.evaluations_ended import EvaluationsFailed, evaluations_ended
from tasks.rollout_ended import rollout_ended
from tests.small_run import memory_store
from tests.whole_runs import ONE_SLOT, config_file, train_here
from tests.workflows.test_evaluation import EVALUATION
from tests.workflows.test_iteration import SETTINGS
from workflows import leaves
from workflows.leaves import leaf

POOLS = PoolsConfig()
NAMED = {"name": "a leaf"}
calls = []


@task
def fragile(number: int, how: str) -> int:
    calls.append(number)
    if how == "for now" and len(calls) < 2:
        raise FlyteRecoverableException("not now")
    if how == "for good":
        raise ValueError("never")
    return number


@workflow
def around(numbers: list[int], how: str) -> list[int | None]:
    return leaf(fragile, {"how": how}, POOLS, "control", NAMED)(number=numbers)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    calls.clear()
    monkeypatch.setattr(leaves, "attempted", functools.partial(_at_once, leaves.attempted))


def _at_once(attempted, call, retries, **inputs):
    return attempted(call, retries, lambda _: None, **inputs)


def test_on_one_machine_a_leaf_that_fails_gives_nothing_and_ends_nothing(caplog):
    assert around(numbers=[3], how="well") == [3]
    assert around(numbers=[3], how="for good") == [None]
    assert "a leaf failed, and training goes on without it: never" in caplog.text
    assert around(numbers=[], how="for good") == []


def test_it_has_the_attempts_of_its_pool():
    assert POOLS.control.retries >= 1
    assert around(numbers=[3], how="for now") == [3]
    assert calls == [3, 3]


def test_on_a_cluster_it_is_a_map_that_asks_for_no_success():
    [node] = get_serializable(OrderedDict(), SETTINGS, around).template.nodes
    array = node.to_flyte_idl().array_node
    assert (array.parallelism, array.min_success_ratio) == (0, 0)
    assert array.HasField("min_success_ratio")
    # Without a number of its own it would take its part of the execution's parallelism.
    assert array.WhichOneof("parallelism_option") == "parallelism"


URL = "memory://evaluations-ended"
CONCLUDED = IterationOutcome(
    run_url=URL, iteration=4, weight_version=5, reward=0.0, tokens=1, tokens_recovered=0, usd=0.0
)
MADE = EvaluationOutcome(run_url=URL, evaluation="00000004-0", weight_version=4, metrics={})


def test_the_end_counts_evaluations_and_tells_of_one_that_was_killed_without_a_word():
    store = memory_store("evaluations-ended")
    store.put(layout.RUN, b"{}")
    assert evaluations_ended(concluded=CONCLUDED, evaluated=[[MADE], [], [MADE]]) == 2
    assert store.list(layout.FAILURES) == []
    with pytest.raises(EvaluationsFailed, match=r"iteration 4, and 1 of 2 evaluations failed; .* was killed at every"):
        evaluations_ended(concluded=CONCLUDED, evaluated=[[MADE], [None], []])
    [failure] = last_failures(store, 5)
    assert (failure.task, failure.iteration) == ("evaluation", 5)
    with pytest.raises(EvaluationsFailed, match="failed: evaluation of version 5, "):
        evaluations_ended(concluded=CONCLUDED, evaluated=[[None]])


@pytest.mark.slow
def test_held_out_prompts_that_are_gone_fail_the_end_of_the_execution_and_no_iteration(tmp_path, model):
    """The first plan has seen them; an evaluation that cannot be planned is one that failed."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "a1b2="}\n')
    url = str(tmp_path / "run")
    known = EVALUATION | {"interval": 1, "data": {"source": str(held_out)}}
    known["rewards"] = [{"function": "format", "arguments": {"pattern": ".*"}}]
    file = config_file(tmp_path, model, url, rollout={"engine": "scripted"}, pools=ONE_SLOT, evaluation=known)
    train_here(file, "--count", "1")
    held_out.unlink()
    output = " ".join(train_here(file, "--count", "1", code=1).replace("│", " ").split())
    store = connect(url)
    assert next_iteration(store) == 2
    assert "training is done up to iteration 1, and 1 of 2 evaluations failed" in output
    assert "held_out.jsonl" in output
    [failure] = last_failures(store, 2)
    assert (failure.task, failure.iteration) == ("evaluation", 2)
    assert "held_out.jsonl" in failure.error


@pytest.mark.slow
def test_training_goes_on_where_the_reward_of_an_evaluation_raises_and_the_execution_ends_with_the_reason(
    tmp_path, model
):
    """All iterations are committed; status begins with what failed; and once it is mended, nothing is told any more."""
    stops = [{"function": "tests.reward_functions:no_multiples_of_three", "on_failure": "stop"}]
    broken = EVALUATION | {"interval": 1, "rewards": stops}
    url = str(tmp_path / "run")
    file = config_file(tmp_path, model, url, rollout={"engine": "scripted"}, pools=ONE_SLOT, evaluation=broken)
    output = train_here(file, "--count", "2", code=1)
    store = connect(url)
    assert next_iteration(store) == 2
    assert evaluations(store) == []
    told = "training is done up to iteration 1, and 3 of 3 evaluations failed"
    assert told in " ".join(output.replace("│", " ").split())
    [failure] = last_failures(store, 2)
    assert (failure.task, failure.iteration) == ("evaluation", 2)
    mended = yaml.safe_load(file.read_text()) | {"evaluation": EVALUATION | {"interval": 1}}
    file.write_text(yaml.safe_dump(mended))
    train_here(file, "--count", "1")
    assert next_iteration(store) == 3
    assert [record.weight_version for record in evaluations(store)] == [2, 3]
    assert last_failures(store, 3) == []


def test_a_leafs_own_command_loads_its_task():
    """That of a map without bound inputs names an empty list of them."""
    for wired in (
        leaf(evaluate, {}, POOLS, "control", NAMED),
        leaf(rollout_ended, {"pool": "p", "slots": [0], "iterations": 1}, POOLS, "control", NAMED),
    ):
        mapped = wired.func
        command = mapped.get_command(SETTINGS)
        arguments = command[command.index("vars") :]
        loaded = ArrayNodeMapTaskResolver().load_task(arguments)
        assert loaded.python_function_task.name == mapped.python_function_task.name
        assert loaded.python_interface.inputs.keys() == mapped.python_interface.inputs.keys()
        assert list in {getattr(kind, "__origin__", kind) for kind in loaded.python_interface.inputs.values()}
