import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from resources.placement import TolerationConfig
from resources.pools import (
    ControlPoolConfig,
    PoolConfig,
    PoolsConfig,
    RolloutPoolConfig,
    overrides,
    pod_template,
    task_settings,
)
from resources.prices import PRICES_VARIABLE, UnknownMachine, machine_price

EVERYTHING = PoolConfig(
    interruptible=True,
    cpu="7",
    memory="30Gi",
    gpus=2,
    accelerator="nvidia-l4",
    retries=5,
    grace_s=90,
    image="ghcr.io/example/vllm:1",
    node_selector={"pool": "l4"},
    tolerations=(TolerationConfig(key="spot", operator="Exists", effect="NoSchedule"),),
)


@pytest.fixture(autouse=True)
def _no_prices_of_the_user(monkeypatch):
    monkeypatch.delenv(PRICES_VARIABLE, raising=False)


def test_requests_and_limits_are_the_same_so_that_neither_clamps_the_other():
    chosen = overrides(EVERYTHING)
    assert chosen["requests"] == chosen["limits"]
    assert (chosen["requests"].cpu, chosen["requests"].mem, chosen["requests"].gpu) == ("7", "30Gi", "2")


def test_a_pool_without_gpus_asks_for_none():
    chosen = overrides(PoolConfig(cpu="500m", memory="1Gi"))
    assert chosen["requests"].gpu is None
    assert not {"accelerator", "container_image"} & chosen.keys()


def test_everything_a_pool_says_reaches_the_node():
    chosen = overrides(EVERYTHING)
    assert (chosen["interruptible"], chosen["retries"], chosen["shared_memory"]) == (True, 5, True)
    assert chosen["container_image"] == "ghcr.io/example/vllm:1"
    assert chosen["accelerator"].to_flyte_idl().device == "nvidia-l4"
    spec = chosen["pod_template"].pod_spec
    assert spec.termination_grace_period_seconds == 90
    assert spec.node_selector == {"pool": "l4"}
    [toleration] = spec.tolerations
    assert (toleration.key, toleration.operator, toleration.effect) == ("spot", "Exists", "NoSchedule")


def test_shared_memory_can_be_left_out():
    assert "shared_memory" not in overrides(PoolConfig(shared_memory=False))


def test_the_pods_main_container_is_the_one_that_flyte_fills_in():
    template = pod_template(PoolConfig())
    assert template.primary_container_name == template.pod_spec.containers[0].name == "primary"
    assert template.pod_spec.node_selector is None
    assert template.pod_spec.tolerations is None


def test_a_declared_task_asks_for_what_its_pool_says():
    chosen = task_settings(ControlPoolConfig())
    assert chosen["requests"] == chosen["limits"]
    assert (chosen["requests"].cpu, chosen["requests"].mem) == ("1", "4Gi")
    assert (chosen["interruptible"], chosen["retries"]) == (False, ControlPoolConfig().retries)
    assert chosen["pod_template"].pod_spec.termination_grace_period_seconds == ControlPoolConfig().grace_s


def test_a_price_is_the_machines_by_the_share_of_its_gpus():
    machine = machine_price("p5.48xlarge")
    assert PoolConfig(machine="p5.48xlarge", gpus=8).price_usd_per_h == machine.on_demand_usd_per_h
    assert PoolConfig(machine="p5.48xlarge", gpus=2).price_usd_per_h == machine.on_demand_usd_per_h / 4
    assert PoolConfig(machine="p5.48xlarge", gpus=1, interruptible=True).price_usd_per_h == machine.spot_usd_per_h / 8


def test_without_gpus_or_with_more_than_there_are_the_whole_machine_is_paid_for():
    machine = machine_price("g6.xlarge")
    assert PoolConfig(gpus=0).price_usd_per_h == machine.on_demand_usd_per_h
    assert PoolConfig(gpus=4).price_usd_per_h == machine.on_demand_usd_per_h


def test_a_price_of_ones_own_goes_first_also_when_it_is_nothing():
    assert PoolConfig(machine="mine", usd_per_hour=1.25, interruptible=True).price_usd_per_h == 1.25
    assert PoolConfig(usd_per_hour=0.0).price_usd_per_h == 0.0
    assert PoolsConfig().control.price_usd_per_h == 0.0


def test_a_machine_without_a_price_is_named():
    with pytest.raises(UnknownMachine, match="no price for 'mine'"):
        _ = PoolConfig(machine="mine").price_usd_per_h


def test_by_default_rollout_is_interruptible_and_the_rest_is_not():
    pools = PoolsConfig()
    assert pools.rollout.interruptible
    assert not pools.train.interruptible
    assert not pools.control.interruptible


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (PoolConfig(interruptible=True), r"train\.interruptible: true given; allowed: false"),
        (PoolConfig(count=2), r"train\.count: 2 given; allowed: 1"),
    ],
)
def test_the_trainer_is_one_reserved_machine(pool, message):
    with pytest.raises(ValueError, match=message):
        PoolsConfig(train=pool)


@pytest.mark.parametrize(
    "field",
    [
        {"count": 0},
        {"concurrency": -1},
        {"cpu": "three"},
        {"memory": "12 GB"},
        {"memory": "-1Gi"},
        {"gpus": 17},
        {"retries": -1},
        {"grace_s": 0},
        {"usd_per_hour": -0.1},
        {"spot": True},
        {"interruptible": "yes"},
    ],
)
def test_what_no_pool_can_be_is_refused(field):
    with pytest.raises(ValidationError):
        TypeAdapter(PoolConfig).validate_python(field)


def test_looking_at_pools_does_not_wait_for_flytekit():
    code = (
        "import sys; from resources.pools import PoolsConfig; PoolsConfig().rollout.price_usd_per_h;"
        "print(sorted({'flytekit', 'kubernetes'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "[]\n"


def test_pools_whose_nodes_would_have_one_name_are_refused():
    """Flyte's node ids have no underscores."""
    with pytest.raises(ValueError, match="more_rollout: two pools are called 'a-b'"):
        PoolsConfig(more_rollout={"a_b": RolloutPoolConfig(), "a-b": RolloutPoolConfig()})
