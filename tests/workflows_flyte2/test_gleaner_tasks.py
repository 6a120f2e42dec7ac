"""What a backend of Flyte 2 is told of our tasks, as far as its SDK writes it without one."""

import asyncio
import importlib

import flyte
import pytest
import yaml
from flyte._internal.resolvers.default import DefaultTaskResolver
from flyte._internal.runtime.task_serde import get_proto_task, translate_task_to_wire
from flyte._internal.runtime.trigger_serde import to_task_trigger
from flyte.models import SerializationContext

from resources.package_code import ROOT
from resources.pools import PoolConfig, PoolsConfig, RolloutPoolConfig
from tasks.configuration.run_config import parse
from tests.small_run import document
from workflows.node_names import NodeNames
from workflows_flyte2 import evaluating, gleaner_tasks, hosting, training
from workflows_flyte2.pool_settings import settings_on
from workflows_flyte2.triggers import scheduled, scheduled_hosts

pytestmark = pytest.mark.filterwarnings("default")
CARRIED = {name: task for name, task in vars(gleaner_tasks).items() if isinstance(task, flyte._task.TaskTemplate)}
CONTEXT = SerializationContext(version="1", project="p", domain="d", org="o", root_dir=ROOT)
SPOT = {
    "count": 2,
    "interruptible": True,
    "gpus": 1,
    "accelerator": "nvidia-l4",
    "cpu": "7",
    "memory": "30Gi",
    "retries": 5,
    "grace_s": 90,
    "image": "registry.example.org/gleaner:2",
    "labels": {"team": "a"},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "env": [{"name": "NAME", "value": "value"}],
    "secrets": [{"group": "g", "key": "k", "env_var": "TOKEN"}],
}


@pytest.fixture
def settings(tmp_path):
    return parse(document(str(tmp_path / "run"), tmp_path, pools={"rollout": SPOT}))


def test_a_pod_finds_each_task_by_its_name():
    entries = {"training": training.training, "evaluation": evaluating.evaluation, "hosts": hosting.hosts}
    assert len(CARRIED) == 14
    for task in [*CARRIED.values(), *entries.values()]:
        resolver = DefaultTaskResolver()
        assert resolver.load_task(resolver.loader_args(task, ROOT)) is task


@pytest.mark.parametrize("name", sorted(CARRIED))
def test_a_task_has_the_inputs_and_outputs_that_it_has_under_flytekit(name):
    module = "tasks.evaluate" if name == "plan_evaluation" else f"tasks.{name}"
    first = getattr(importlib.import_module(module), name).python_interface
    second = CARRIED[name].native_interface
    assert {each: kind for each, (kind, _) in second.inputs.items()} == first.inputs
    assert list(second.outputs.values()) == list(first.outputs.values())


def test_a_pool_says_the_same_to_flyte_2(settings):
    names = NodeNames.of_iteration(1, 2, settings.run.url)
    task = gleaner_tasks.rollout.override(**settings_on(settings.pools, "rollout", names, "rollout"))
    assert task.short_name == "iteration 1 of 2: rollout"
    template = get_proto_task(with_image(task), CONTEXT)
    metadata, pod = template.metadata, template.k8s_pod
    assert (metadata.interruptible, metadata.discoverable) == (True, False)
    assert (metadata.retries.retries, metadata.retries.backoff.base.seconds) == (5, 5)
    assert not metadata.HasField("timeout")
    assert pod.metadata.labels["team"] == "a"
    assert len(pod.metadata.labels) == 4
    spec = dict(pod.pod_spec)
    [container] = spec["containers"]
    assert spec["terminationGracePeriodSeconds"] == 90
    assert [dict(each) for each in spec["tolerations"]] == [{"key": "spot", "operator": "Exists"}]
    assert container["image"] == "registry.example.org/gleaner:2"
    assert [dict(each) for each in container["env"]] == [{"name": "NAME", "value": "value"}]
    assert dict(container["resources"]["limits"]) == {"cpu": "7", "memory": "30Gi"}
    # The SDK has no limit for GPUs: a backend sets it, as Kubernetes takes no other number than the request.
    assert dict(container["resources"]["requests"]) == {"cpu": "7", "memory": "30Gi", "gpu": "1"}
    assert template.extended_resources.gpu_accelerator.device == "nvidia-l4"
    assert template.extended_resources.HasField("shared_memory")
    [secret] = template.security_context.secrets
    assert (secret.group, secret.key, secret.env_var) == ("g", "k", "TOKEN")


def with_image(task):
    """A task as `flyte deploy` makes it, which looks up the image by its name."""
    task.image = flyte.Image.from_base("registry.example.org/gleaner:1")
    return task


def test_reserved_pools_are_not_interruptible_and_control_has_no_shared_memory(settings):
    train = settings_on(settings.pools, "train", NodeNames(), "train")
    control = settings_on(settings.pools, "control", NodeNames(), "plan")
    assert (train["interruptible"], control["interruptible"]) == (False, False)
    assert (train["resources"].shm, control["resources"].shm) == ("auto", None)
    image = get_proto_task(with_image(gleaner_tasks.plan.override(**control)), CONTEXT).k8s_pod.pod_spec
    assert image["containers"][0]["image"] == "registry.example.org/gleaner:1"


@pytest.mark.parametrize(
    ("pool", "path"), [("train", "train"), ("big", "more_rollout.big"), ("teachers", "scoring.teachers")]
)
def test_a_pod_template_by_name_is_refused(pool, path):
    named = PoolConfig(pod_template="gpu")
    pools = PoolsConfig(
        train=named, more_rollout={"big": RolloutPoolConfig(pod_template="gpu")}, scoring={"teachers": named}
    )
    with pytest.raises(ValueError, match=rf"pools\.{path}\.pod_template: value 'gpu'; allowed on Flyte 2: null"):
        settings_on(pools, pool, NodeNames(), "train")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(training.training, "triggers", ())
    monkeypatch.setattr(hosting.hosts, "triggers", ())

    def write(**sections):
        path = tmp_path / "my.yaml"
        path.write_text(yaml.safe_dump(document(str(tmp_path / "run"), tmp_path, **sections)))
        return path

    return write


def written(task):
    """The task's triggers as a backend gets them."""
    spec = translate_task_to_wire(with_image(task.override()), CONTEXT)
    inputs = spec.task_template.interface.inputs
    return [asyncio.run(to_task_trigger(each, task.name, inputs, list(spec.default_inputs))) for each in task.triggers]


def test_a_trigger_has_the_schedule_and_the_configuration(file):
    scheduled(file(), "0 * * * *", iterations=3, overrides=["optimizer.learning_rate=1e-5"], name="mine")
    [trigger] = written(training.training)
    assert trigger.name == "mine"
    assert trigger.automation_spec.schedule.cron.expression == "0 * * * *"
    bound = {each.name: each.value for each in trigger.spec.inputs.literals}
    assert bound["count"].scalar.primitive.integer == 3
    assert b"learning_rate" in bound["config"].scalar.binary.value
    with pytest.raises(ValueError, match="'mine' given to two triggers"):
        scheduled(file(), name="mine")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schedule": "@daily"}, "schedule: '@daily' given; allowed: a cron expression of five fields"),
        ({"iterations": 0}, "count: value 0; allowed: above 0"),
        ({"name": "1st"}, "name: value '1st'"),
        ({"overrides": ["optimizer.rate=1"]}, "optimizer.rate"),
    ],
)
def test_a_trigger_that_cannot_be_is_not_made(file, changed, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        scheduled(file(), **changed)
    assert training.training.triggers == ()


def test_hosts_are_scheduled_for_a_fleet_alone(file, tmp_path):
    inputs = {"count": 2, "hours": 8, "memory_gib": 64}
    with pytest.raises(ValueError, match=r"trainer\.fleet: value null"):
        scheduled_hosts(file(), "*/10 * * * *", **inputs)
    scheduled_hosts(
        str(file(trainer={"placement": "shared", "fleet": str(tmp_path / "fleet")}, planning={"seeding": "off"})),
        "*/10 * * * *",
        **inputs,
    )
    [trigger] = written(hosting.hosts)
    bound = {each.name: each.value.scalar.primitive for each in trigger.spec.inputs.literals if each.name != "config"}
    assert (bound["count"].integer, bound["hours"].float_value) == (2, 8.0)
