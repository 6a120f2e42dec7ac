"""Evaluation as a user runs it: real processes, one of them killed; and what a cluster is told."""

import shutil
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from flytekit.tools.translator import get_serializable

from storage.clock import SystemClock
from storage.journal.compaction import read_responses
from storage.records import layout
from storage.records.evaluations import evaluations
from storage.records.run import next_iteration
from storage.stores.connect import connect
from tasks.configuration.run_config import load
from tasks.preparing.evaluation import prepare
from tasks.sampling.session.member import generate_slot
from tests.small_run import commit_iteration, everything, plan_iteration, roll_out, train_small
from tests.whole_runs import (
    KILLABLE,
    ONE_SLOT,
    config_file,
    kill_a_slot_in_the_middle,
    run_here,
    train_here,
)
from tests.workflows.test_iteration import CONFIG, SETTINGS, unrolled
from workflows.evaluation import evaluate_version, evaluation

EVALUATION = {
    "data": {"source": "arithmetic", "limit": 8, "seed": 99},
    "num_generations": 4,
    "sampling": KILLABLE["sampling"],
    "interval": 2,
}


def evaluation_begun(store, runs) -> str:
    """The url of the run's only evaluation, as soon as it is planned."""
    while runs():
        for key in store.list(layout.EVALUATIONS):
            name, _, rest = key.removeprefix(layout.EVALUATIONS).partition("/")
            if rest == layout.plan(0):
                return layout.evaluation_url(store.url, name)
        time.sleep(0.01)
    raise AssertionError("no evaluation was planned")


@contextmanager
def a_slot_is_killed(store):
    """Kill a slot of the run's only evaluation, which is made within; gives a future of the evaluation's url."""
    over = threading.Event()

    def kill():
        url = evaluation_begun(store, lambda: not over.is_set())
        kill_a_slot_in_the_middle(connect(url), lambda: not over.is_set())
        return url

    with ThreadPoolExecutor(1) as thread:
        try:
            yield thread.submit(kill)
        finally:
            over.set()


def tokens(url: str) -> list[tuple[str, list[int], float | None]]:
    return [(row.prompt_id, row.token_ids.tolist(), row.reward) for row in read_responses(connect(url), 0)]


def undisturbed(config: Path, folder: Path, version: int) -> list[list[int]]:
    """What the same evaluation samples in a copy of the run in which it was never made, with nobody killed."""
    settings = load(config)
    shutil.copytree(settings.run.url, folder, ignore=shutil.ignore_patterns("evaluations"))
    copy = yaml.safe_load(config.read_text())
    copy["run"]["url"] = str(folder)
    copy["rollout"]["max_responses_in_flight"] = 16
    (folder.parent / "copy.yaml").write_text(yaml.safe_dump(copy))
    reference, slots = prepare(load(folder.parent / "copy.yaml"), version, "test", SystemClock())
    for slot in slots:
        generate_slot(reference.run_url, 0, slot, lambda: False, SystemClock())
    return [row[1] for row in tokens(reference.run_url)]


def run_file(folder: Path, model: Path, **sections: object) -> Path:
    return config_file(folder, model, str(folder / "run"), evaluation=EVALUATION, **sections)


@pytest.mark.slow
def test_training_evaluates_what_is_due_with_the_same_prompts(tmp_path, model):
    """The responses themselves are not looked at, so members need no model."""
    config = run_file(tmp_path, model, rollout={"engine": "scripted"}, pools=ONE_SLOT)
    train_here(config, "--count", "2")
    store = connect(str(tmp_path / "run"))
    assert next_iteration(store) == 2
    zeroth, second = evaluations(store)
    assert (zeroth.weight_version, second.weight_version) == (0, 2)  # version 1 was not due
    assert zeroth.digest == second.digest
    assert [prompt.prompt_id for prompt in zeroth.prompts] == [prompt.prompt_id for prompt in second.prompts]


@pytest.mark.slow
def test_an_evaluation_survives_a_kill_and_is_made_once(tmp_path, model):
    config = run_file(tmp_path, model, rollout=KILLABLE["rollout"])
    url = load(config).run.url
    plan_iteration(load(config))
    roll_out(url, 0)
    train_small(url, 0)
    commit_iteration(url, 0)
    store = connect(url)
    with a_slot_is_killed(store) as killed:
        assert "pass@4" in run_here("evaluation", "--config", str(config), "--version", "1")
    of_first = killed.result()
    [first] = evaluations(store)
    assert first.weight_version == 1
    assert first.metrics["val/resume/tokens_recovered"] > 0
    assert first.metrics["val/preempt/count"] >= 1
    assert [row[1] for row in tokens(of_first)] == undisturbed(config, tmp_path / "copy", 1)

    before = everything(store)
    run_here("evaluation", "--config", str(config))  # the newest, which has ended
    assert everything(store) == before


# What a cluster is told.


def by_kind(nodes):
    """Protocol buffers of the nodes of evaluations: crews, and what measures them."""
    known = [node.to_flyte_idl() for node in nodes]
    crews = [node for node in known if node.id.endswith("-evaluation-rollout")]
    return crews, [node for node in known if node.id.endswith("-evaluation")]


def test_nothing_of_training_waits_for_an_evaluation():
    nodes = unrolled(3, CONFIG | {"evaluation": EVALUATION})
    assert len(nodes) == 3 * (5 + 2) + 2 + 1
    crews, measures = by_kind(nodes)
    assert [len(kind) for kind in (crews, measures)] == [4, 4]
    own = {node.id for kind in (crews, measures) for node in kind}
    of_training = [node.to_flyte_idl() for node in nodes if node.id not in own]
    conclusions = [node for node in of_training if node.task_node.reference_id.name == "tasks.conclude.conclude"]
    planned = [node for node in of_training if node.task_node.reference_id.name == "tasks.plan.plan"]
    [end] = [node for node in of_training if node.id.endswith("-evaluations")]
    assert all(not own & set(node.upstream_node_ids) for node in of_training if node is not end)
    assert {*end.upstream_node_ids} == {conclusions[-1].id, *(measure.id for measure in measures)}
    for origin, crew, measure in zip([planned[0], *conclusions], crews, measures, strict=True):
        assert list(crew.upstream_node_ids) == [origin.id]
        assert set(measure.upstream_node_ids) == {origin.id, crew.id}
        assert crew.array_node.node.metadata.interruptible
        element = measure.array_node.node.metadata
        assert not element.interruptible
        assert element.WhichOneof("interruptible_value") == "interruptible"
    order = [node.id for node in nodes]
    # On one machine nodes run in this order: the next iteration's conclusion may delete what is evaluated.
    later = [conclusions[0].id, *(plan.id for plan in planned[1:])]
    assert all(order.index(m.id) < order.index(n) for m, n in zip(measures, later, strict=False))
    assert order[-1] == end.id
    evaluates = [binding.binding.scalar for plan in planned for binding in plan.inputs if binding.var == "evaluates"]
    assert [scalar.primitive.boolean for scalar in evaluates] == [True, False, False]


def test_with_staleness_it_is_the_same():
    nodes = unrolled(3, CONFIG | {"evaluation": EVALUATION, "algorithm": {"max_staleness": 1}})
    crews, measures = by_kind(nodes)
    own = {node.id for kind in (crews, measures) for node in kind}
    assert len(own) == 8
    known = [node.to_flyte_idl() for node in nodes]
    assert all(not own & set(node.upstream_node_ids) for node in known if node.id not in own and node is not known[-1])


@pytest.mark.parametrize("config", [CONFIG, CONFIG | {"evaluation": EVALUATION | {"interval": 0}}])
def test_training_that_does_not_evaluate_has_no_node_for_it(config):
    assert len(unrolled(2, config)) == 10
    assert not [node for node in unrolled(1, config) if "evaluat" in node.id]


@pytest.mark.parametrize("entity", [evaluation, evaluate_version])
def test_no_input_or_output_travels_as_a_pickle(entity):
    interface = get_serializable(OrderedDict(), SETTINGS, entity).template.interface
    assert "Pickle" not in str(interface.to_flyte_idl())
