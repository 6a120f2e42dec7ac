"""The hosts of a fleet as a map over reserved machines, and what serves one on this machine."""

from collections import OrderedDict

import pytest
import yaml
from flytekit import LaunchPlan
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.tools.translator import get_serializable

from storage.clock import SystemClock
from storage.fleet import fleet_layout
from storage.stores.connect import connect
from tasks.fleet_host import fleet_host
from tasks.sharing.fleet_view import look_at_fleet
from tasks.sharing.membership import create_fleet
from tests.workflows.test_iteration import CONFIG, SETTINGS, dispatched
from workflows.fleet import hosts, scheduled_hosts, serving

FLEET = {
    "trainer": {"placement": "shared", "fleet": "s3://bucket/fleet", "nproc_per_node": 8},
    "planning": {"seeding": "off"},
}
MACHINES = {
    "pools": {**CONFIG["pools"], "train": {"gpus": 4, "memory": "500Gi"}},
    "trainer": FLEET["trainer"] | {"nproc_per_node": 4},
}


def test_hosts_are_a_map_over_the_trainers_machines():
    spec = dispatched(hosts, config=CONFIG | FLEET | MACHINES, count=3, hours=8.0, memory_gib=400.0, backfill_s=120.0)
    [node] = [node.to_flyte_idl() for node in spec.nodes]
    requests = node.array_node.node.task_node.overrides.resources.requests
    assert {each.value for each in requests} >= {"4", "500Gi"}
    assert not node.array_node.node.metadata.interruptible
    bound = {each.var: each.binding for each in node.inputs}
    assert len(bound["slot"].collection.bindings) == 3
    assert bound["devices"].scalar.primitive.integer == 4


def test_a_configuration_without_a_fleet_is_refused():
    with pytest.raises(FlyteUserRuntimeException, match=r"trainer\.fleet: value null"):
        dispatched(hosts, config=CONFIG, count=1, hours=1.0, memory_gib=1.0, backfill_s=0.0)


@pytest.fixture
def config_file(tmp_path):
    def write(**sections):
        file = tmp_path / "my.yaml"
        file.write_text(yaml.safe_dump(CONFIG | FLEET | sections))
        return file

    yield write
    LaunchPlan.CACHE.pop("fleet_hosts", None)


HOSTS = {"count": 2, "hours": 8.0, "memory_gib": 200.0}


def test_hosts_are_started_at_every_tick_unless_the_last_execution_still_runs(config_file):
    plan = scheduled_hosts(config_file(), "*/10 * * * *", **HOSTS)
    spec = get_serializable(OrderedDict(), SETTINGS, plan).to_flyte_idl().spec
    assert spec.workflow_id.name == "workflows.fleet.serving"
    assert spec.entity_metadata.schedule.cron_schedule.schedule == "*/10 * * * *"
    assert spec.concurrency_policy.max == 1
    assert set(spec.fixed_inputs.literals) == {"config", "count", "hours", "memory_gib"}
    assert not spec.default_inputs.parameters
    assert spec.fixed_inputs.literals["count"].scalar.primitive.integer == 2


def test_the_scheduled_workflow_is_the_map_of_hosts():
    [node] = get_serializable(OrderedDict(), SETTINGS, serving).template.nodes
    assert node.to_flyte_idl().task_node.reference_id.name == "workflows.fleet.hosts"


@pytest.mark.parametrize(
    ("sections", "changed", "said"),
    [
        ({"trainer": {}}, {}, "trainer.fleet: value null; allowed here: the url of a fleet"),
        ({}, {"schedule": "0 0 * * * *"}, "schedule: '0 0 [*] [*] [*] [*]' given; allowed: a cron expression of five"),
        ({}, {"count": 0}, "count: value 0; allowed: above 0"),
        ({}, {"hours": 0.0}, "hours: value 0.0; allowed: above 0"),
        ({}, {"memory_gib": -1.0}, "memory_gib: value -1.0; allowed: above 0"),
    ],
)
def test_a_plan_that_cannot_be_is_not_registered(config_file, sections, changed, said):
    with pytest.raises(ValueError, match=said):
        scheduled_hosts(config_file(**sections), **{"schedule": "@hourly"} | HOSTS | changed)
    assert "fleet_hosts" not in LaunchPlan.CACHE


@pytest.mark.slow
def test_a_host_serves_until_its_hours_are_over_and_says_what_it_was(tmp_path):
    url = str(tmp_path / "fleet")
    create_fleet(url, [str(tmp_path / "runs")], 5.0, 1.1, SystemClock())
    name = fleet_host(fleet=url, slot=0, hours=1e-4, memory_gib=1.0, devices=1, backfill_s=0.0, usd_per_hour=2.0)
    assert connect(url).list(fleet_layout.HOSTS) == [fleet_layout.host(name)]
    [seen] = look_at_fleet(url).hosts
    assert seen.state == "gone"
    assert sum(seen.spent_s.values()) == pytest.approx(seen.spent_s["idle"])
    assert seen.spent_s["idle"] >= 0.36
