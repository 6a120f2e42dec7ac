"""What a cluster is told: the serialised nodes of an iteration, static and unrolled inside the dynamic."""

from collections import OrderedDict

import pytest
from flyteidl.core import tasks_pb2
from flytekit import workflow
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal, LiteralMap
from flytekit.tools.translator import get_serializable

from resources.labels import url_label
from resources.pools import ControlPoolConfig
from tasks.conclude import conclude
from tasks.configuration.references import IterationOutcome
from tasks.configuration.run_config import parse, settings_digest
from tasks.configuration.trainer import TrainerConfig
from tasks.evaluate import evaluate, plan_evaluation
from tasks.forecast import make_forecast
from tasks.plan import plan
from tasks.regrade import regrade
from workflows.evaluation import evaluate_version
from workflows.iteration import iteration, iteration_nodes
from workflows.node_names import NodeNames
from workflows.regrading import regrade_run
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
    outcome: IterationOutcome = iteration_nodes(config, after, POOLS, TrainerConfig(), NodeNames(), last=False, code="")
    return outcome


def split(nodes):
    """Of one iteration: plan, rollout, train and conclude as protocol buffers."""
    [rollout] = [node for node in nodes if node.id.endswith("rollout") and "end-of" not in node.id]
    of_task = {node.to_flyte_idl().task_node.reference_id.name: node for node in nodes}
    found = (of_task["tasks.plan.plan"], rollout, of_task["tasks.train.train"], of_task["tasks.conclude.conclude"])
    return [node.to_flyte_idl() for node in found]


def static_nodes():
    return get_serializable(OrderedDict(), SETTINGS, one_iteration).template.nodes


def unrolled(count, config=CONFIG):
    """The nodes that the dynamic task tells the cluster to run."""
    return job(count, config).nodes


def job(count, config=CONFIG):
    """What the dynamic task hands to the cluster, as its container would work it out."""
    return dispatched(iterations, config=config, count=count, code="")


def dispatched(dynamic_task, **inputs):
    """What a dynamic task hands to the cluster, as its container would work it out."""
    context = FlyteContextManager.current_context()
    with FlyteContextManager.with_context(
        context.with_serialization_settings(SETTINGS).with_execution_state(
            context.execution_state.with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
        )
    ) as inside:
        dynamic_task._wf = None  # a process of the cluster unrolls it once
        kinds = dynamic_task.python_interface.inputs
        literals = {
            name: value
            if isinstance(value, Literal)
            else TypeEngine.to_literal(inside, value, kinds[name], TypeEngine.to_literal_type(kinds[name]))
            for name, value in inputs.items()
        }
        return dynamic_task.dispatch_execute(inside, LiteralMap(literals))


CPU, GPU, MEMORY = (tasks_pb2.Resources.ResourceName.Value(name) for name in ("CPU", "GPU", "MEMORY"))


def quantities(entries):
    return {entry.name: entry.value for entry in entries}


@pytest.fixture(scope="module", params=["static", "dynamic"])
def nodes(request):
    """plan, rollout, train, conclude of one iteration on the pools of CONFIG."""
    return split(static_nodes() if request.param == "static" else unrolled(1))


def test_train_is_a_sibling_of_rollout_and_nothing_that_carries_on_waits_for_it(nodes):
    plan, rollout, train, conclude = nodes
    assert set(plan.upstream_node_ids) == set()
    assert set(rollout.upstream_node_ids) == {plan.id}
    assert set(train.upstream_node_ids) == {plan.id}
    assert set(conclude.upstream_node_ids) == {train.id}


def test_on_one_machine_where_siblings_run_in_order_rollout_comes_first():
    names = [node.to_flyte_idl().WhichOneof("target") for node in static_nodes()]
    assert names.index("array_node") == 1  # plan, rollout, its end, train, conclude


def test_rollout_is_an_array_of_interruptible_elements_of_which_none_must_succeed(nodes):
    array = nodes[1].array_node
    assert array.node.metadata.interruptible
    assert array.node.metadata.retries.retries == 9
    assert array.parallelism == 3
    assert array.WhichOneof("success_criteria") == "min_success_ratio"
    assert array.min_success_ratio == 0.0
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


TWO_POOLS = {
    **CONFIG,
    "pools": {
        **CONFIG["pools"],
        "more_rollout": {"far": {"count": 2, "concurrency": 1, "gpus": 4, "interruptible": False, "retries": 5}},
    },
}


LABELLED = {
    **TWO_POOLS,
    "pools": {
        **TWO_POOLS["pools"],
        "labels": {"team": "research"},
    },
}


def pod_labels(task_node):
    return dict(task_node.overrides.pod_template.metadata.labels)


def test_every_pod_says_which_run_iteration_pool_and_team_pays_for_it():
    nodes = [node.to_flyte_idl() for node in unrolled(2, LABELLED)]
    found = {}
    for node in nodes:
        is_map = node.WhichOneof("target") == "array_node"
        found[node.id] = pod_labels(node.array_node.node.task_node if is_map else node.task_node)
    common = {"gleaner-run": url_label("s3://bucket/run"), "team": "research"}
    pools = {"plan": "control", "rollout": "rollout", "rollout-far": "far", "train": "train", "conclude": "control"}
    pools |= {"end-of-rollout": "control", "end-of-rollout-far": "control"}
    assert found == {
        f"{'z' if 'rollout' in what else 'i'}{number}-{what}": {
            **common,
            "gleaner-iteration": str(number),
            "gleaner-pool": pool,
        }
        for number in (1, 2)
        for what, pool in pools.items()
    }


def test_each_pool_builds_on_the_pod_template_that_it_names():
    pools = {name: dict(fields) for name, fields in TWO_POOLS["pools"].items()}
    pools["rollout"]["pod_template"], pools["train"]["pod_template"] = "with-cache", "with-nccl"
    tasks = {task.id.name: task.metadata.pod_template_name for task in job(1, CONFIG | {"pools": pools}).tasks}
    names = sorted(name for name in tasks if "map_rollout_" in name and "rollout_ended" not in name)
    assert [tasks[name] for name in names] == [None, "with-cache"]
    assert tasks["tasks.train.train"] == "with-nccl"
    assert tasks["tasks.plan.plan"] is tasks["tasks.conclude.conclude"] is None
    again = {task.id.name: task.metadata.pod_template_name for task in job(1, CONFIG).tasks}
    assert set(again.values()) == {None}


def test_the_first_line_of_an_execution_names_its_settings(monkeypatch, capsys):
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "f0a1")
    monkeypatch.setenv("FLYTE_INTERNAL_TASK_VERSION", "43f7afc835df")
    unrolled(2)
    first = capsys.readouterr().err.splitlines()[0]
    digest = settings_digest(parse(CONFIG))
    said = f"run s3://bucket/run, wiring 2 iterations with settings {digest}, version 43f7afc835df: begins, granted "
    assert said in first


def test_a_single_iteration_is_the_last_of_its_execution():
    nodes = get_serializable(OrderedDict(), SETTINGS, iteration).template.nodes
    conclude = split(nodes)[3]
    [last] = [binding.binding for binding in conclude.inputs if binding.var == "last"]
    assert last.scalar.primitive.boolean


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_each_pool_of_the_crew_is_a_map_of_its_own(max_staleness):
    nodes = [node.to_flyte_idl() for node in unrolled(2, TWO_POOLS | {"algorithm": {"max_staleness": max_staleness}})]
    leaves = [node for node in nodes if node.WhichOneof("target") == "array_node"]
    maps = [node for node in leaves if "end-of" not in node.id]
    assert [array.id for array in maps] == ["z1-rollout", "z1-rollout-far", "z2-rollout", "z2-rollout-far"]
    assert [array.array_node.parallelism for array in maps] == [3, 1, 3, 1]
    elements = [array.array_node.node for array in maps]
    assert [element.metadata.interruptible for element in elements] == [True, False, True, False]
    assert [element.metadata.retries.retries for element in elements] == [9, 5, 9, 5]
    assert [quantities(e.task_node.overrides.resources.requests)[GPU] for e in elements] == ["1", "4", "1", "4"]
    for index, array in enumerate(maps):
        [slots] = [binding.binding.promise for binding in array.inputs if binding.var == "slot"]
        assert (slots.node_id, [part.int_value for part in slots.attr_path]) == (f"i{index // 2 + 1}-plan", [index % 2])
        [ended] = [node for node in leaves if node.id == array.id.replace("-", "-end-of-", 1)]
        assert set(ended.upstream_node_ids) == {array.id, slots.node_id}
        assert quantities(ended.array_node.node.task_node.overrides.resources.requests) == {CPU: "2", MEMORY: "3Gi"}


@pytest.mark.parametrize(
    "entity",
    [iterations, evaluate_version, plan, conclude, plan_evaluation, evaluate, make_forecast, regrade_run, regrade],
)
def test_what_is_declared_before_a_configuration_is_known_asks_for_the_control_pools_machine(entity):
    """Of the platform's default, 200 MiB, Python alone takes half."""
    template = get_serializable(OrderedDict(), SETTINGS, entity).template.to_flyte_idl()
    assert template.metadata.retries.retries == ControlPoolConfig().retries
    assert template.metadata.WhichOneof("interruptible_value") == "interruptible"
    assert not template.metadata.interruptible
    spec = template.k8s_pod.pod_spec
    [container] = spec["containers"]
    asked = {"cpu": ControlPoolConfig().cpu, "memory": ControlPoolConfig().memory}
    assert dict(container["resources"]["requests"]) == dict(container["resources"]["limits"]) == asked
    assert container["name"] == template.config["primary_container_name"]
    assert entity.name.rpartition(".")[2] in list(container["args"])
    assert spec["terminationGracePeriodSeconds"] == ControlPoolConfig().grace_s


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


@pytest.mark.parametrize(
    ("nnodes", "name", "task_type"),
    [(1, "tasks.train.train", "python-task"), (2, "tasks.train_elastic.train_elastic", "pytorch")],
)
def test_several_ranks_are_trained_on_the_same_pool_and_on_several_nodes_by_the_elastic_task(nnodes, name, task_type):
    found = job(1, {**CONFIG, "trainer": {"nnodes": nnodes, "nproc_per_node": 4}})
    of_task = {node.to_flyte_idl().task_node.reference_id.name: node.to_flyte_idl() for node in found.nodes}
    assert {"tasks.train.train", "tasks.train_elastic.train_elastic"} & of_task.keys() == {name}
    assert quantities(of_task[name].task_node.overrides.resources.requests)[GPU] == "8"
    assert [task.type for task in found.tasks if task.id.name == name] == [task_type]
