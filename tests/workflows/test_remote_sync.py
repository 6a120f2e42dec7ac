"""What `pyflyte run --remote --wait` and FlyteRemote make of an execution of training: outputs, and no exception.

flytekit's own client asks a Flyte admin server on the loopback. The server's answers hold the workflow as it is
registered, and the nodes that the dynamic task hands to the cluster.
"""

from collections import OrderedDict
from contextlib import contextmanager

import grpc
import pytest
from flyteidl.admin import execution_pb2, launch_plan_pb2, node_execution_pb2, task_execution_pb2, workflow_pb2
from flyteidl.core import compiler_pb2, identifier_pb2, literals_pb2
from flyteidl.core import execution_pb2 as phases
from flyteidl.core import workflow_pb2 as core
from flytekit.configuration import Config
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteAssertion
from flytekit.models.literals import LiteralMap
from flytekit.remote import FlyteRemote
from flytekit.tools.translator import get_serializable

from tasks.configuration.references import IterationOutcome
from tests.cluster_servers import TestAdmin, admin_server
from tests.workflows.test_iteration import CONFIG, SETTINGS, job
from workflows.config_input import Configuration
from workflows.training import iterations, training

TRAINING, NODE = "workflows.training.training", "n0"
DONE, RUNNING, QUEUED = phases.NodeExecution.SUCCEEDED, phases.NodeExecution.RUNNING, phases.NodeExecution.QUEUED
OUTCOME = IterationOutcome(
    run_url="s3://bucket/run", iteration=1, weight_version=2, reward=0.5, tokens=640, tokens_recovered=12, usd=1.25
)


def identifier(kind, name):
    return identifier_pb2.Identifier(resource_type=kind, project="p", domain="d", name=name, version="v")


def literals(values, kinds):
    context = FlyteContextManager.current_context()
    made = {
        name: TypeEngine.to_literal(context, values[name], kind, TypeEngine.to_literal_type(kind))
        for name, kind in kinds.items()
    }
    return LiteralMap(made).to_flyte_idl()


class RunAdmin(TestAdmin):
    """One execution of training, of two iterations; `phase_of` gives a node's phase by its id, or None before it."""

    def __init__(self, phase, phase_of, is_unrolled):
        super().__init__()
        self.phase, self.phase_of, self.is_unrolled = phase, phase_of, is_unrolled
        self.id = identifier_pb2.WorkflowExecutionIdentifier(project="p", domain="d", name="e")
        entities = OrderedDict()
        self.template = get_serializable(entities, SETTINGS, training).template.to_flyte_idl()
        dynamic = next(spec for entity, spec in entities.items() if entity is iterations)
        self.closure = self._closure(self.template, [dynamic.template])
        handed = job(2, CONFIG | {"evaluation": {"data": {"source": "arithmetic"}, "interval": 1}})
        inner = core.WorkflowTemplate(
            id=identifier(identifier_pb2.WORKFLOW, "inner"),
            metadata=self.template.metadata,
            interface=self.template.interface,
            nodes=[node.to_flyte_idl() for node in handed.nodes],
            outputs=[each.to_flyte_idl() for each in handed.outputs],
        )
        self.inner = self._closure(inner, handed.tasks)
        self.arrays = {node.id for node in inner.nodes if node.WhichOneof("target") == "array_node"}
        self.inputs = literals({"config": CONFIG, "count": 2}, {"config": dict, "count": int})
        is_done = phase == phases.WorkflowExecution.SUCCEEDED
        self.outputs = literals({"o0": OUTCOME}, {"o0": IterationOutcome}) if is_done else literals_pb2.LiteralMap()

    @staticmethod
    def _closure(template, tasks):
        return compiler_pb2.CompiledWorkflowClosure(
            primary=compiler_pb2.CompiledWorkflow(template=template),
            tasks=[compiler_pb2.CompiledTask(template=each.to_flyte_idl()) for each in tasks],
        )

    def GetExecution(self, request, context):  # noqa: N802
        spec = execution_pb2.ExecutionSpec(launch_plan=identifier(identifier_pb2.LAUNCH_PLAN, TRAINING))
        closure = execution_pb2.ExecutionClosure(phase=self.phase, workflow_id=self.template.id)
        if self.phase == phases.WorkflowExecution.FAILED:
            closure.error.message = "out of memory"
        return execution_pb2.Execution(id=request.id, spec=spec, closure=closure)

    def GetExecutionData(self, request, context):  # noqa: N802
        return execution_pb2.WorkflowExecutionGetDataResponse(full_inputs=self.inputs, full_outputs=self.outputs)

    def GetLaunchPlan(self, request, context):  # noqa: N802
        spec = launch_plan_pb2.LaunchPlanSpec(workflow_id=self.template.id)
        return launch_plan_pb2.LaunchPlan(id=request.id, spec=spec, closure=launch_plan_pb2.LaunchPlanClosure())

    def GetWorkflow(self, request, context):  # noqa: N802
        closure = workflow_pb2.WorkflowClosure(compiled_workflow=self.closure)
        return workflow_pb2.Workflow(id=request.id, closure=closure)

    def _node(self, node_id, spec_id, phase, **metadata):
        return node_execution_pb2.NodeExecution(
            id=identifier_pb2.NodeExecutionIdentifier(node_id=node_id, execution_id=self.id),
            closure=node_execution_pb2.NodeExecutionClosure(phase=phase),
            metadata=node_execution_pb2.NodeExecutionMetaData(spec_node_id=spec_id, **metadata),
        )

    def ListNodeExecutions(self, request, context):  # noqa: N802
        found = node_execution_pb2.NodeExecutionList()
        if not request.unique_parent_id:
            unrolled = {"is_parent_node": self.is_unrolled, "is_dynamic": self.is_unrolled}
            ended = {
                phases.WorkflowExecution.SUCCEEDED: DONE,
                phases.WorkflowExecution.FAILED: phases.NodeExecution.FAILED,
            }
            phase = ended.get(self.phase, phases.NodeExecution.DYNAMIC_RUNNING if self.is_unrolled else RUNNING)
            found.node_executions.extend(
                [self._node("start-node", "start-node", DONE), self._node(NODE, NODE, phase, **unrolled)]
            )
            return found
        assert request.unique_parent_id == NODE
        for spec_id in ("start-node", *(node.id for node in self.inner.primary.template.nodes)):
            phase = DONE if spec_id == "start-node" else self.phase_of(spec_id)
            if phase is not None:
                is_array = spec_id in self.arrays
                found.node_executions.append(self._node(f"{NODE}-0-{spec_id}", spec_id, phase, is_array=is_array))
        return found

    def GetNodeExecutionData(self, request, context):  # noqa: N802
        if request.id.node_id == f"{NODE}-0-i2-train":
            context.abort(grpc.StatusCode.NOT_FOUND, "no inputs yet")
        answer = node_execution_pb2.NodeExecutionGetDataResponse()
        if request.id.node_id == NODE:
            answer.full_inputs.CopyFrom(self.inputs)
            answer.full_outputs.CopyFrom(self.outputs)
            if self.is_unrolled:
                answer.dynamic_workflow.id.CopyFrom(self.inner.primary.template.id)
                answer.dynamic_workflow.compiled_workflow.CopyFrom(self.inner)
        return answer

    def ListTaskExecutions(self, request, context):  # noqa: N802
        found = task_execution_pb2.TaskExecutionList()
        found.task_executions.append(
            self._task(
                identifier_pb2.TaskExecutionIdentifier(
                    task_id=identifier(identifier_pb2.TASK, "t"), node_execution_id=request.node_execution_id
                )
            )
        )
        return found

    def _task(self, task):
        return task_execution_pb2.TaskExecution(
            id=task, closure=task_execution_pb2.TaskExecutionClosure(phase=phases.TaskExecution.RUNNING)
        )

    def GetTaskExecution(self, request, context):  # noqa: N802
        return self._task(request.id)

    def GetTaskExecutionData(self, request, context):  # noqa: N802
        return task_execution_pb2.TaskExecutionGetDataResponse()


@contextmanager
def connected(folder, phase, phase_of=lambda _: DONE, *, is_unrolled=True):
    """(flytekit's client, the execution as fetched)."""
    with admin_server(folder, RunAdmin(phase, phase_of, is_unrolled)) as config:
        remote = FlyteRemote(Config.auto(str(config)), default_project="p", default_domain="d")
        yield remote, remote.fetch_execution(name="e")


def test_an_ended_execution_gives_its_outputs_and_those_of_its_nodes(tmp_path):
    with connected(tmp_path, phases.WorkflowExecution.SUCCEEDED) as (remote, execution):
        waited = remote.wait(execution)
        assert waited.is_successful
        assert waited.outputs.get("o0", IterationOutcome) == OUTCOME
        assert waited.outputs["o0"].weight_version == 2
        assert waited.inputs.get("config", dict) == Configuration(CONFIG)
        node = waited.node_executions[NODE]
        assert node.outputs.get("o0", IterationOutcome) == OUTCOME
        assert {
            "n0-0-i2-conclude",
            "n0-0-z1-rollout",
            "n0-0-zall-evaluations",
        } <= node.subworkflow_node_executions.keys()
        of_it_alone = remote.wait(remote.fetch_execution(name="e"), sync_nodes=False)
        assert of_it_alone.outputs.get("o0", IterationOutcome) == OUTCOME
        assert of_it_alone.node_executions == {}


def begun(node_id):
    """The phases in the second iteration: training is queued, and its crew generates."""
    if node_id.startswith(("i1", "z1", "z0")) or node_id == "i2-plan":
        return DONE
    return {"z2-rollout": RUNNING, "i2-train": QUEUED}.get(node_id)


@pytest.mark.parametrize("is_unrolled", [True, False])
def test_a_running_execution_is_synced_wherever_it_stands(tmp_path, is_unrolled):
    with connected(tmp_path, phases.WorkflowExecution.RUNNING, begun, is_unrolled=is_unrolled) as (remote, execution):
        synced = remote.sync(execution, sync_nodes=True)
        assert not synced.is_done
        children = synced.node_executions[NODE].subworkflow_node_executions
        assert ("n0-0-i2-train" in children) == is_unrolled
        assert "n0-0-i2-conclude" not in children
        assert synced.inputs.get("count", int) == 2
        with pytest.raises(FlyteAssertion, match="Please wait until the execution has completed"):
            _ = synced.outputs


def test_a_failed_execution_gives_its_error(tmp_path):
    with connected(tmp_path, phases.WorkflowExecution.FAILED, begun) as (remote, execution):
        waited = remote.wait(execution)
        assert not waited.is_successful
        assert waited.error.message == "out of memory"
