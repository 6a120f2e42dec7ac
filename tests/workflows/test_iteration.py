"""What a cluster is told: the serialised nodes of an iteration, static and unrolled inside the dynamic."""

from collections import OrderedDict

import pytest
from flyteidl.core import tasks_pb2
from flytekit import workflow
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import LiteralMap
from flytekit.tools.translator import get_serializable

from tasks.configuration.references import IterationOutcome
from tasks.configuration.run_config import parse
from tasks.learning.config import TrainerConfig
from tasks.train_elastic import elastic_trainer
from workflows.iteration import iteration, iteration_nodes
from workflows.training import iterations, training

SETTINGS = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")
CONFIG = {
    "run": {"url": "s3://bucket/run"},
    "policy": {"path": "/models/m"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "arithmetic"}],
    "pools": {
        "rollout": {
            "interruptible": True,
            "count": 4,
            "concurrency": 3,
            "cpu": "7",
            "memory": "30Gi",
            "gpus": 1,
            "accelerator": "nvidia-l4",
            "retries": 9,
            "grace_s": 90,
            "image": "ghcr.io/example/rollout:1",
            "tolerations": [{"key": "spot", "operator": "Exists"}],
        },
        "train": {"cpu": "20", "memory": "200Gi", "gpus": 8, "retries": 2, "grace_s": 45},
        "control": {"cpu": "2", "memory": "3Gi", "retries": 1},
    },
}
POOLS = parse(CONFIG).pools


@workflow
def one_iteration(config: dict, after: int = -1) -> IterationOutcome:  # type: ignore[type-arg]
    outcome: IterationOutcome = iteration_nodes(config, after, POOLS, TrainerConfig(), last=False)
    return outcome


def split(nodes):
    """Of one iteration: plan, rollout, train and conclude as protocol buffers."""
    [rollout] = [node for node in nodes if node.to_flyte_idl().WhichOneof("target") == "array_node"]
    of_task = {node.to_flyte_idl().task_node.reference_id.name: node for node in nodes}
    found = (of_task["tasks.plan.plan"], rollout, of_task["tasks.train.train"], of_task["tasks.conclude.conclude"])
    return [node.to_flyte_idl() for node in found]


def static_nodes():
    return get_serializable(OrderedDict(), SETTINGS, one_iteration).template.nodes


def unrolled(count, config=CONFIG):
    """The nodes that the dynamic task tells the cluster to run, as its container would work them out."""
    context = FlyteContextManager.current_context()
    inputs = {"config": config, "count": count}
    with FlyteContextManager.with_context(
        context.with_serialization_settings(SETTINGS).with_execution_state(
            context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
        )
    ) as inside:
        iterations._wf = None  # a process of the cluster unrolls it once
        kinds = iterations.python_interface.inputs
        literals = {
            name: TypeEngine.to_literal(inside, value, kinds[name], TypeEngine.to_literal_type(kinds[name]))
            for name, value in inputs.items()
        }
        return iterations.dispatch_execute(inside, LiteralMap(literals)).nodes


CPU, GPU, MEMORY = (tasks_pb2.Resources.ResourceName.Value(name) for name in ("CPU", "GPU", "MEMORY"))


def quantities(entries):
    return {entry.name: entry.value for entry in entries}


@pytest.fixture(scope="module", params=["static", "dynamic"])
def nodes(request):
    """plan, rollout, train, conclude of one iteration on the pools of CONFIG."""
    return split(static_nodes() if request.param == "static" else unrolled(1))


def test_train_is_a_sibling_of_rollout_and_conclude_waits_for_both(nodes):
    plan, rollout, train, conclude = nodes
    assert set(plan.upstream_node_ids) == set()
    assert set(rollout.upstream_node_ids) == {plan.id}
    assert set(train.upstream_node_ids) == {plan.id}
    assert set(conclude.upstream_node_ids) == {plan.id, rollout.id, train.id}


def test_on_one_machine_where_siblings_run_in_order_rollout_comes_first():
    names = [node.to_flyte_idl().WhichOneof("target") for node in static_nodes()]
    assert names.index("array_node") == 1  # plan, rollout, train, conclude


def test_rollout_is_an_array_of_interruptible_elements_of_which_all_must_succeed(nodes):
    array = nodes[1].array_node
    assert array.node.metadata.interruptible
    assert array.node.metadata.retries.retries == 9
    assert array.parallelism == 3
    assert array.min_success_ratio == 1.0
    assert list(array.bound_inputs) == ["plan"]


def test_every_element_asks_for_what_it_is_limited_to(nodes):
    for task_node, expected in (
        (nodes[0].task_node, {CPU: "2", MEMORY: "3Gi"}),
        (nodes[1].array_node.node.task_node, {CPU: "7", MEMORY: "30Gi", GPU: "1"}),
        (nodes[2].task_node, {CPU: "20", MEMORY: "200Gi", GPU: "8"}),
        (nodes[3].task_node, {CPU: "2", MEMORY: "3Gi"}),
    ):
        resources = task_node.overrides.resources
        assert quantities(resources.requests) == quantities(resources.limits) == expected


def test_train_is_never_on_a_machine_that_may_vanish(nodes):
    plan, _, train, conclude = nodes
    for node in (plan, train, conclude):
        assert node.metadata.WhichOneof("interruptible_value") == "interruptible"  # said, not left to the platform
        assert not node.metadata.interruptible
    assert train.metadata.retries.retries == 2


def grace_s(task_node):
    return task_node.overrides.pod_template.pod_spec["terminationGracePeriodSeconds"]


def test_the_pools_pods_are_those_of_the_nodes(nodes):
    _, rollout, train, _ = nodes
    element = rollout.array_node.node.task_node
    assert (grace_s(element), grace_s(train.task_node)) == (90, 45)
    assert element.overrides.pod_template.primary_container_name == "primary"
    [toleration] = element.overrides.pod_template.pod_spec["tolerations"]
    assert dict(toleration) == {"key": "spot", "operator": "Exists"}
    assert element.overrides.container_image == "ghcr.io/example/rollout:1"
    assert element.overrides.extended_resources.gpu_accelerator.device == "nvidia-l4"
    assert element.overrides.extended_resources.HasField("shared_memory")
    assert train.task_node.overrides.container_image == ""


def test_iterations_in_a_row_wait_for_the_conclusion_of_the_one_before():
    nodes = [node.to_flyte_idl() for node in unrolled(3)]
    assert len(nodes) == 12
    plans = [node for node in nodes if node.task_node.reference_id.name == "tasks.plan.plan"]
    conclusions = [node for node in nodes if node.task_node.reference_id.name == "tasks.conclude.conclude"]
    assert [list(plan.upstream_node_ids) for plan in plans] == [[], [conclusions[0].id], [conclusions[1].id]]
    last = [binding.binding for node in conclusions for binding in node.inputs if binding.var == "last"]
    assert [binding.scalar.primitive.boolean for binding in last] == [False, False, True]


def test_with_staleness_the_next_rollout_runs_beside_training_and_nothing_else_does():
    nodes = [node.to_flyte_idl() for node in unrolled(4, CONFIG | {"algorithm": {"max_staleness": 1}})]
    assert len(nodes) == 16
    plans, trains, conclusions = (
        [node for node in nodes if node.task_node.reference_id.name == name]
        for name in ("tasks.plan.plan", "tasks.train.train", "tasks.conclude.conclude")
    )
    rollouts = [node for node in nodes if node.WhichOneof("target") == "array_node"]
    plan, rollout, train, conclude = ([node.id for node in kind] for kind in (plans, rollouts, trains, conclusions))

    def upstream(kind):
        return [set(node.upstream_node_ids) for node in kind]

    assert upstream(plans) == [set(), {plan[0]}, {plan[1], conclude[0]}, {plan[2], conclude[1]}]
    assert upstream(rollouts) == [{plan[0]}, *({plan[k], rollout[k - 1]} for k in (1, 2, 3))]
    assert upstream(trains) == [{plan[0]}, *({plan[k], train[k - 1]} for k in (1, 2, 3))]
    own = [{plan[k], rollout[k], train[k]} for k in range(4)]
    assert upstream(conclusions) == [own[0], *(own[k] | {conclude[k - 1]} for k in (1, 2, 3))]
    order = [node.id for node in nodes]
    # On one machine nodes run in this order: a plan must come before the trainer that would give it newer weights.
    assert all(order.index(plan[k + 1]) < order.index(train[k]) for k in range(3))
    assert all(order.index(conclude[k]) < order.index(rollout[k + 1]) for k in range(3))
    last = [binding.binding for node in conclusions for binding in node.inputs if binding.var == "last"]
    assert [binding.scalar.primitive.boolean for binding in last] == [False, False, False, True]


TWO_POOLS = {
    **CONFIG,
    "pools": {
        **CONFIG["pools"],
        "more_rollout": {"far": {"count": 2, "concurrency": 1, "gpus": 4, "interruptible": False, "retries": 5}},
    },
}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_each_pool_of_the_crew_is_a_map_of_its_own_and_conclusions_wait_for_all(max_staleness):
    nodes = [node.to_flyte_idl() for node in unrolled(2, TWO_POOLS | {"algorithm": {"max_staleness": max_staleness}})]
    maps = [node for node in nodes if node.WhichOneof("target") == "array_node"]
    assert [array.array_node.parallelism for array in maps] == [3, 1, 3, 1]
    elements = [array.array_node.node for array in maps]
    assert [element.metadata.interruptible for element in elements] == [True, False, True, False]
    assert [element.metadata.retries.retries for element in elements] == [9, 5, 9, 5]
    assert [quantities(e.task_node.overrides.resources.requests)[GPU] for e in elements] == ["1", "4", "1", "4"]
    plans = [node.id for node in nodes if node.task_node.reference_id.name == "tasks.plan.plan"]
    for index, array in enumerate(maps):
        [slots] = [binding.binding.promise for binding in array.inputs if binding.var == "slot"]
        assert (slots.node_id, [part.int_value for part in slots.attr_path]) == (plans[index // 2], [index % 2])
    if max_staleness:
        assert [set(array.upstream_node_ids) for array in maps[2:]] == [{plans[1], array.id} for array in maps[:2]]
    conclusions = [node for node in nodes if node.task_node.reference_id.name == "tasks.conclude.conclude"]
    for index, conclusion in enumerate(conclusions):
        assert {array.id for array in maps[2 * index : 2 * index + 2]} <= set(conclusion.upstream_node_ids)


def planned_for(nodes):
    """The pools that the plan is told there are machines of."""
    [plan] = [node for node in nodes if node.task_node.reference_id.name == "tasks.plan.plan"]
    [pools] = [binding.binding.collection.bindings for binding in plan.inputs if binding.var == "pools"]
    return [pool.scalar.primitive.string_value for pool in pools]


def test_a_plan_is_told_for_which_pools_there_are_machines():
    """A slot of another would never start."""
    one = get_serializable(OrderedDict(), SETTINGS, iteration).template.nodes
    assert planned_for([node.to_flyte_idl() for node in one]) == ["rollout"]
    assert planned_for([node.to_flyte_idl() for node in unrolled(1, TWO_POOLS)]) == ["rollout", "far"]


@pytest.mark.parametrize("entity", [iteration, training, iterations, one_iteration])
def test_no_input_or_output_travels_as_a_pickle(entity):
    """A pickle is a file at the machine that wrote it, and a program to the one that reads it."""
    interface = get_serializable(OrderedDict(), SETTINGS, entity).template.interface
    assert "Pickle" not in str(interface.to_flyte_idl())


def test_a_single_iteration_is_the_last_of_its_execution():
    nodes = get_serializable(OrderedDict(), SETTINGS, iteration).template.nodes
    conclude = split(nodes)[3]
    [last] = [binding.binding for binding in conclude.inputs if binding.var == "last"]
    assert last.scalar.primitive.boolean


@pytest.mark.parametrize(("nnodes", "task_type"), [(1, "python-task"), (2, "pytorch")])
def test_several_ranks_are_trained_by_the_elastic_task_on_the_same_pool(nnodes, task_type):
    found = unrolled(1, {**CONFIG, "trainer": {"nnodes": nnodes, "nproc_per_node": 4}})
    of_task = {node.to_flyte_idl().task_node.reference_id.name: node.to_flyte_idl() for node in found}
    assert "tasks.train.train" not in of_task
    train = of_task["tasks.train_elastic.train_elastic"]
    assert quantities(train.task_node.overrides.resources.requests)[GPU] == "8"
    assert elastic_trainer(nnodes, 4).task_type == task_type
