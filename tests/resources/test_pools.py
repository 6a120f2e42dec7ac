import base64
import json
import subprocess
import sys

import pytest
from flyteidl.core.security_pb2 import Secret
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.client import ApiClient
from pydantic import TypeAdapter, ValidationError

from resources.labels import check_label_value
from resources.pools import (
    POOL_NAME,
    ControlPoolConfig,
    PoolConfig,
    PoolsConfig,
    RolloutPoolConfig,
    checked_image,
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
    tolerations=({"key": "spot", "operator": "Exists", "effect": "NoSchedule"},),
    pod_template="with-cache",
    labels={"team": "research", "tier": None, "kueue.x-k8s.io/queue-name": "spot-gpus"},
    env=({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}},),
    secrets=({"group": "wandb", "key": 'a"key', "env_var": "WANDB_API_KEY"},),
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
    spec = ApiClient().sanitize_for_serialization(chosen["pod_template"].pod_spec)
    [container] = spec.pop("containers")
    assert container["env"] == list(EVERYTHING.env)
    assert spec == {
        "terminationGracePeriodSeconds": 90,
        "nodeSelector": {"pool": "l4"},
        "tolerations": list(EVERYTHING.tolerations),
    }


def test_labels_of_a_pod_are_those_of_its_run_and_of_its_pool_which_go_before():
    template = pod_template(EVERYTHING, {"team": "another", "gleaner-run": "math-1"})
    assert template.labels == {
        "team": "research",
        "tier": "",
        "gleaner-run": "math-1",
        "kueue.x-k8s.io/queue-name": "spot-gpus",
        "inject-flyte-secrets": "true",
    }


def test_flyte_reads_which_secrets_a_pod_asks_for():
    """The reading is that of Flyte's webhook: base 32 with its own letters, then protobuf text."""
    letters = str.maketrans("abcdefghijklmnopqrstuvwxyz123456", "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")
    asked = pod_template(EVERYTHING).annotations["flyte.secrets/s0"].translate(letters)
    decoded = base64.b32decode(asked + "=" * (-len(asked) % 8)).decode()
    secret = text_format.Parse(decoded, Secret())
    assert (secret.group, secret.key, secret.env_var) == ("wandb", 'a"key', "WANDB_API_KEY")
    assert secret.mount_requirement == Secret.ENV_VAR
    assert pod_template(PoolConfig()).labels is pod_template(PoolConfig()).annotations is None


def test_the_end_of_the_log_is_the_message_of_a_container_that_wrote_none():
    [container] = pod_template(PoolConfig()).pod_spec.containers
    assert container.termination_message_policy == "FallbackToLogsOnError"


def test_every_pod_but_controls_has_shared_memory():
    assert "shared_memory" not in overrides(ControlPoolConfig())
    assert overrides(PoolConfig())["shared_memory"]


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
        TypeAdapter(PoolConfig).validate_json(json.dumps(field))


@pytest.mark.parametrize(("number", "text"), [(3, "3"), (1.5, "1.5"), ("500m", "500m"), (" 2 ", "2")])
def test_quantities_may_be_numbers(number, text):
    assert TypeAdapter(PoolConfig).validate_json(json.dumps({"cpu": number})).cpu == text


def test_pools_by_name():
    pools = PoolsConfig(more_rollout={"far": RolloutPoolConfig(count=7)})
    assert pools.named("far").count == 7
    assert pools.named("rollout") is pools.rollout
    assert (pools.named("train"), pools.named("control")) == (pools.train, pools.control)


def test_labels_of_all_pools_are_checked():
    with pytest.raises(ValueError, match=r"^labels\.team: value 'a b'"):
        PoolsConfig(labels={"team": "a b"})


def test_looking_at_pools_does_not_wait_for_flytekit():
    code = (
        "import sys; from resources.pools import PoolsConfig; PoolsConfig().rollout.price_usd_per_h;"
        "print(sorted({'flytekit', 'kubernetes'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["spot-", "spot_", "-spot", "Spot", "1a", "", "a b", "ä", "a\n", "a" * 41])
def test_a_pool_whose_name_cannot_be_a_label_is_refused(name):
    with pytest.raises(ValueError, match=r"^more_rollout: value .*; allowed: names of up to 40 small letters"):
        PoolsConfig(more_rollout={name: RolloutPoolConfig()})


@given(st.from_regex(POOL_NAME.replace("$", r"\Z")))
def test_kubernetes_takes_the_name_of_every_pool_as_a_label(name):
    check_label_value("gleaner-pool", name)
    assert PoolsConfig(more_rollout={f"p{name}"[:40].rstrip("-_"): RolloutPoolConfig()})


def test_pools_whose_nodes_would_have_one_name_are_refused():
    """Flyte's node ids have no underscores."""
    with pytest.raises(ValueError, match="more_rollout: two pools are called 'a-b'"):
        PoolsConfig(more_rollout={"a_b": RolloutPoolConfig(), "a-b": RolloutPoolConfig()})


@pytest.mark.parametrize(
    "reference",
    ["gleaner:0.1.0", "ghcr.io/example/gleaner:main", "localhost:30000/a/b_c:1", "x/y@sha256:" + "0" * 64],
)
def test_images_with_a_tag_or_digest_pass(reference: str):
    assert checked_image(reference) == reference


@pytest.mark.parametrize(
    "reference", ["", "gleaner", "ghcr.io/example/gleaner", "localhost:30000/a", "a b:1", "x@sha256:12"]
)
def test_images_without_a_tag_or_digest_are_refused(reference: str):
    with pytest.raises(ValueError, match=r"image: value .*; allowed: registry/name:tag"):
        checked_image(reference)
