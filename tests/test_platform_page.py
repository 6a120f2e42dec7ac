"""What the guide's pages platform.md and on_a_cluster.md tell a cluster, against what the code asks for and accepts."""

import json
import re
from pathlib import Path

import pytest
import yaml

from resources.kubernetes_fields import check_subdomain, check_tolerations
from resources.labels import POOL_LABEL, is_spot_label
from resources.pools import PoolConfig, PoolsConfig
from resources.quantities import amount
from tasks.configuration.run_config import load, parse
from tasks.configuration.trainer import TrainerConfig
from tasks.doctor.cluster import ClusterDemand
from tasks.doctor.cluster_objects import MAGIC_NAMES
from tasks.doctor.flyte_settings import DELAY, DELAY_MAX, JUDGES, PENDING, RESERVED, ROUNDS, SPOT, configured_limits
from tasks.doctor.network_policies import policy_problem, selects
from tasks.local_map import SYSTEM_RETRIES
from tests.workflows.test_iteration import CONFIG, job, pod_labels
from workflows.compiled_size import FLYTE_BYTES_MAX

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/guide/platform.md").read_text(encoding="utf-8")
# The right that a request of S3 needs, by the S3 user guide.
RIGHTS = {
    "put_object": "s3:PutObject",
    "get_object": "s3:GetObject",
    "delete_object": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
}


def block(mark: str) -> str:
    [body] = re.findall(rf"^<!-- {mark} -->\n```\w+\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return body


INLINE = yaml.safe_load(block("helm values"))["configuration"]["inline"]
KUBERNETES = INLINE["plugins"]["k8s"]
# Setting -> (what the page calls its default, what it says to set).
SETTINGS = {
    name: (default, wanted)
    for names, default, wanted in re.findall(
        r"^\| (`[^|]+) \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", PAGE, flags=re.MULTILINE
    )
    for name in re.findall(r"`([\w.-]+)`", names)
}
# How the page calls the settings that `gleaner doctor --cluster` reads, where it is not their path.
ON_THE_PAGE = {
    SPOT: "interruptible-node-selector-requirement",
    "storage.limits.maxdownloadmbs": "maxDownloadMBs",
    "storage.cache.max_size_mbs": "max_size_mbs",
    "tasks.task-plugins.enabled-plugins": "tasks.task-plugins",
}


ASKED = ClusterDemand(pools=PoolsConfig(), trainer=TrainerConfig())


def all_pools(pools: PoolsConfig) -> list[PoolConfig]:
    return [*pools.rollout_pools.values(), pools.train, pools.control]


@pytest.mark.parametrize("example", sorted(path.name for path in ROOT.glob("examples/*.yaml")))
def test_the_limits_hold_the_pools_of_every_example(example):
    limits = INLINE["task_resources"]["limits"]
    for pool in all_pools(load(ROOT / "examples" / example).pools):
        assert amount(pool.cpu) <= amount(limits["cpu"])
        assert amount(pool.memory) <= amount(limits["memory"])
        assert pool.gpus <= int(limits["gpu"])


def test_flytes_own_limits_would_cap_the_default_pools():
    """Why the page asks for others."""
    [row] = re.findall(r"^\| `task_resources.limits` \| cpu (\S+), memory (\S+), gpu 1 \|", PAGE, flags=re.MULTILINE)
    assert amount(PoolConfig().cpu) > amount(row[0])
    assert amount(PoolConfig().memory) > amount(row[1])


def test_the_doctor_takes_the_defaults_that_the_page_names():
    """A setting that nobody has made is judged as its default, and wrong only if the page says to change it."""
    for path, judge in JUDGES.items():
        default = SETTINGS[ON_THE_PAGE.get(path, path)][0]
        number = re.match(r"-?\d+", default)
        if number is not None:
            named = default if path.endswith("delay") else int(number[0])
            assert judge(named, ASKED) == judge(None, ASKED)
        assert (judge(None, ASKED) is not None) == (path in (PENDING, SPOT, RESERVED, ROUNDS, DELAY))
        assert (default in ("off", "none")) == (path in (PENDING, SPOT, RESERVED))
    limits = configured_limits({})
    default, _ = SETTINGS["task_resources.limits"]
    assert default == f"cpu {limits['cpu']}, memory {limits['memory']}, gpu {limits['gpu']}"


def test_what_the_page_says_to_leave_is_left_or_set_to_its_default():
    left = [name for name, (_, wanted) in SETTINGS.items() if wanted.startswith("leave")]
    assert len(left) == 4
    for name in left:
        value = INLINE
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        assert value is None or isinstance(value, dict) or str(value) == SETTINGS[name][0]


def test_lost_machines_are_counted_as_the_code_counts_on():
    counted = INLINE["propeller"]["node-config"]
    assert counted == {"max-node-retries-system-failures": SYSTEM_RETRIES, "interruptible-failure-threshold": -1}
    assert f"| `propeller.node-config.max-node-retries-system-failures` | {SYSTEM_RETRIES} |" in PAGE


def seconds_that_an_execution_outlives(rounds, delay, delay_max):
    """How long Flyte's store may refuse: each wait is twice the one before, up to the longest."""
    return sum(min(delay_max, delay * 2**number) for number in range(rounds))


def test_with_what_the_page_and_the_doctor_ask_for_an_execution_outlives_minutes_of_refusals():
    propeller = INLINE["propeller"]
    queue = propeller["queue"]["queue"]
    assert (queue["base-delay"], queue["max-delay"]) == ("100ms", "10s")
    assert seconds_that_an_execution_outlives(propeller["max-workflow-retries"], 0.1, 10.0) > 900
    assert seconds_that_an_execution_outlives(10, 0.0, 60.0) == 0
    # The least that the doctor takes; anything below it is wrong.
    least = {ROUNDS: (100, 99), DELAY: ("100ms", "99ms"), DELAY_MAX: ("2s", "1s")}
    for path, (enough, too_little) in least.items():
        assert JUDGES[path](enough, ASKED) is None
        assert JUDGES[path](too_little, ASKED) is not None
    assert seconds_that_an_execution_outlives(100, 0.1, 2.0) > 180


def test_flyte_reads_and_keeps_the_longest_workflow_that_the_code_allows():
    megabytes = FLYTE_BYTES_MAX >> 20
    assert INLINE["storage"]["limits"]["maxDownloadMBs"] >= megabytes
    assert INLINE["storage"]["cache"]["max_size_mbs"] in {0, 1024 * megabytes}
    assert f"| `maxDownloadMBs` among the limits of the storage | {megabytes} |" in PAGE


def test_pods_may_wait_at_least_as_long_as_the_trainer_does():
    hours = int(KUBERNETES["pod-pending-timeout"].removesuffix("h"))
    assert hours * 3600 >= TrainerConfig().group_timeout_s
    assert hours * 3600 >= parse(CONFIG).run.lease_ttl_s


def test_interruptible_pods_go_to_spot_machines_and_others_do_not():
    check_tolerations("interruptible-tolerations", KUBERNETES["interruptible-tolerations"])
    spot = KUBERNETES["interruptible-node-selector-requirement"]
    other = KUBERNETES["non-interruptible-node-selector-requirement"]
    assert (spot["operator"], other["operator"]) == ("In", "NotIn")
    assert spot["values"] == other["values"]
    assert is_spot_label(spot["key"], spot["values"][0])


@pytest.mark.parametrize("trainer", [{}, {"nproc_per_node": 2}, {"nnodes": 2}])
def test_every_kind_of_task_has_a_plugin(trainer):
    plugins = INLINE["tasks"]["task-plugins"]
    kinds = {task.type for task in job(1, CONFIG | {"trainer": trainer}).tasks}
    assert kinds <= plugins["default-for-task-types"].keys()
    assert set(plugins["default-for-task-types"].values()) == set(plugins["enabled-plugins"])


def requests_of(source: str) -> set[str]:
    """The requests of S3 that a source makes."""
    return set(re.findall(r"""ask\(\s*"(\w+)\"""", source))


def test_the_policy_allows_what_the_store_calls_and_nothing_else():
    called = requests_of((ROOT / "storage/stores/s3.py").read_text(encoding="utf-8"))
    assert called == RIGHTS.keys()
    objects, bucket = json.loads(block("iam policy"))["Statement"]
    assert {*objects["Action"], bucket["Action"]} == {RIGHTS[request] for request in called}
    assert bucket["Action"] == "s3:ListBucket"
    assert objects["Resource"].startswith(f"{bucket['Resource']}/")
    assert {objects["Effect"], bucket["Effect"]} == {"Allow"}


def test_a_request_that_the_policy_does_not_know_is_found():
    assert requests_of('s3.ask("copy_object", request)\ns3.ask(\n "put_object")') == {"copy_object", "put_object"}


def test_the_service_account_can_be_the_one_of_a_pod_template():
    account = yaml.safe_load(block("service account"))
    assert (account["apiVersion"], account["kind"]) == ("v1", "ServiceAccount")
    name = account["metadata"]["name"]
    check_subdomain("name", name)
    assert TEMPLATE["template"]["spec"]["serviceAccountName"] == name
    assert f"`--service-account {name}`" in PAGE


POLICIES = list(yaml.safe_load_all(block("network policy")))
RANKS_OF_NODES = {"nnodes": 2, "nproc_per_node": 4}


def labels_by_pool(trainer) -> dict[str, dict[str, str]]:
    """The labels of the pods that a run declares, by their pool."""
    nodes = [node.to_flyte_idl() for node in job(1, CONFIG | {"trainer": trainer}).nodes]
    tasks = [node.array_node.node.task_node if node.HasField("array_node") else node.task_node for node in nodes]
    return {labels[POOL_LABEL]: labels for labels in map(pod_labels, tasks)}


@pytest.mark.parametrize("trainer", [{"nproc_per_node": 8}, RANKS_OF_NODES])
def test_the_network_policies_hold_for_every_pod_and_let_only_ranks_reach_each_other(trainer):
    assert {(each["apiVersion"], each["kind"]) for each in POLICIES} == {("networking.k8s.io/v1", "NetworkPolicy")}
    pods = labels_by_pool(trainer)
    assert {"train", "rollout", "control"} <= pods.keys()
    everyone, ranks = (each["spec"] for each in POLICIES)
    assert all(selects(everyone["podSelector"], labels) for labels in pods.values())
    assert "ingress" not in everyone
    assert {name for name, labels in pods.items() if selects(ranks["podSelector"], labels)} == {"train"}
    [rule] = ranks["ingress"]
    [peer] = rule["from"]
    assert {name for name, labels in pods.items() if selects(peer["podSelector"], labels)} == {"train"}
    assert rule["ports"] == [{"protocol": "TCP", "port": 1, "endPort": 65535}]
    assert policy_problem(POLICIES, pods["train"]) is None


def test_the_settings_of_the_page_on_spot_in_an_hour_are_this_page_s_and_hold_its_pools():
    text = (ROOT / "docs/guide/spot_in_an_hour.md").read_text(encoding="utf-8")
    fragment, pools = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    inline = fragment["configuration"]["inline"]
    settings = inline["plugins"]["k8s"]
    assert settings.keys() < KUBERNETES.keys()
    assert JUDGES[SPOT](settings["interruptible-node-selector-requirement"], ASKED) is None
    assert JUDGES[RESERVED](settings["non-interruptible-node-selector-requirement"], ASKED) is None
    for pool in all_pools(parse(pools).pools):
        assert amount(pool.cpu) <= amount(inline["task_resources"]["limits"]["cpu"])
        assert amount(pool.memory) <= amount(inline["task_resources"]["limits"]["memory"])
        assert pool.gpus <= int(inline["task_resources"]["limits"]["gpu"])


def on_a_cluster(mark: str) -> list[str]:
    page = (ROOT / "docs/guide/on_a_cluster.md").read_text(encoding="utf-8")
    return re.findall(rf"^<!-- {mark} -->\n```yaml\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


PODS = on_a_cluster("pods")
[TEMPLATE] = map(yaml.safe_load, on_a_cluster("pod template"))


def test_the_fragments_about_pods_are_valid():
    assert len(PODS) == 5
    pools = [parse(CONFIG | yaml.safe_load(fragment)).pools for fragment in PODS]
    said = {name for each in pools for pool in all_pools(each) for name, value in vars(pool).items() if value}
    assert {"labels", "env", "secrets", "tolerations", "node_selector"} <= said


def test_flyte_builds_a_pod_on_the_container_of_the_pod_template_that_mounts_its_volumes():
    spec = TEMPLATE["template"]["spec"]
    [container] = spec["containers"]
    assert container["name"] in MAGIC_NAMES
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    assert f"`pod_template: {TEMPLATE['metadata']['name']}`" in (ROOT / "docs/guide/on_a_cluster.md").read_text()
