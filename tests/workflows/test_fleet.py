"""The hosts of a fleet as a map over reserved machines, and what serves one on this machine."""

import pytest
from flytekit.exceptions.user import FlyteUserRuntimeException

from storage import fleet_layout
from storage.clock import SystemClock
from storage.connect import connect
from tasks.fleet_host import fleet_host
from tasks.sharing.fleet_view import look_at_fleet
from tasks.sharing.membership import create_fleet
from tests.workflows.test_iteration import CONFIG, dispatched
from workflows.fleet import hosts

FLEET = {"trainer": {"placement": "shared", "fleet": "s3://bucket/fleet"}}
MACHINES = {"pools": {**CONFIG["pools"], "train": {"gpus": 4, "memory": "500Gi"}}}


def test_hosts_are_a_map_over_the_trainers_machines():
    spec = dispatched(hosts, config=CONFIG | FLEET | MACHINES, count=3, hours=8.0, memory_gib=400.0)
    [node] = [node.to_flyte_idl() for node in spec.nodes]
    requests = node.array_node.node.task_node.overrides.resources.requests
    assert {each.value for each in requests} >= {"4", "500Gi"}
    assert not node.array_node.node.metadata.interruptible
    bound = {each.var: each.binding for each in node.inputs}
    assert len(bound["slot"].collection.bindings) == 3


def test_a_configuration_without_a_fleet_is_refused():
    with pytest.raises(FlyteUserRuntimeException, match=r"trainer\.fleet: value null"):
        dispatched(hosts, config=CONFIG, count=1, hours=1.0, memory_gib=1.0)


@pytest.mark.slow
def test_a_host_serves_until_its_hours_are_over_and_says_what_it_was(tmp_path):
    url = str(tmp_path / "fleet")
    create_fleet(url, [str(tmp_path / "runs")], 5.0, 1.1, SystemClock())
    name = fleet_host(fleet=url, slot=0, hours=1e-4, memory_gib=1.0, usd_per_hour=2.0)
    assert connect(url).list(fleet_layout.HOSTS) == [fleet_layout.host(name)]
    [seen] = look_at_fleet(url).hosts
    assert seen.state == "gone"
    assert sum(seen.spent_s.values()) == pytest.approx(seen.spent_s["idle"])
    assert seen.spent_s["idle"] >= 0.36
