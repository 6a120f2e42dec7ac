"""`gleaner doctor --cluster` against a Flyte admin server and a Kubernetes API server on the loopback."""

import re
import socket
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from gleaner import main
from tests.cluster_servers import TOKEN, ApiAnswers, TestAdmin, admin_server, api_server, flyte_config, kubeconfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/guide/platform.md").read_text(encoding="utf-8")
NAMESPACE = "/api/v1/namespaces/gleaner-development"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/gleaner-development/networkpolicies"
QUEUES = "/apis/kueue.x-k8s.io/v1beta1/namespaces/gleaner-development/localqueues"
POOLS = {
    "rollout": {
        "machine": "g6.xlarge",
        "labels": {"kueue.x-k8s.io/queue-name": "spot"},
        "pod_template": "gpu",
        "env": [
            {"name": "WORD", "valueFrom": {"secretKeyRef": {"name": "word", "key": "it"}}},
            {"name": "MODELS", "valueFrom": {"configMapKeyRef": {"name": "models", "key": "it"}}},
            {"name": "PERHAPS", "valueFrom": {"configMapKeyRef": {"name": "perhaps", "key": "it", "optional": True}}},
        ],
    },
    "train": {"gpus": 1, "memory": "64Gi"},
}


def pod_template(*containers):
    return {"template": {"spec": {"containers": [{"name": name, "image": "x"} for name in containers]}}}


def quota(name, **hard):
    return {"metadata": {"name": name}, "spec": {"hard": hard}}


def helm_values():
    [body] = re.findall(r"^<!-- helm values -->\n```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return yaml.safe_load(body)["configuration"]["inline"]


def settings(document):
    """The ConfigMaps of Flyte's namespace."""
    texts = {"000-core.yaml": "{logger: {level: 5}}", "010-inline.yaml": yaml.safe_dump(document), "note": "no: [yaml"}
    return {"items": [{"metadata": {"name": "flyte-binary-config"}, "data": texts}]}


class Place:
    """Both servers, which hold all that POOLS names, and the command."""

    def __init__(self, folder):
        self.admin, self.api, self.folder = TestAdmin(), ApiAnswers(), folder
        objects = {
            "/version": {"gitVersion": "v1.34.1"},
            NAMESPACE: {"metadata": {"name": "gleaner-development"}},
            f"{NAMESPACE}/podtemplates/gpu": pod_template("primary"),
            f"{NAMESPACE}/configmaps/models": {"metadata": {"name": "models"}},
            f"{NAMESPACE}/secrets/word": {"metadata": {"name": "word"}},
            f"{NAMESPACE}/resourcequotas": {"items": [quota("team", cpu="64", pods="20")]},
            "/apis/kueue.x-k8s.io": {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta1"}},
            f"{QUEUES}/spot": {"status": {"conditions": [{"type": "Active", "status": "True"}]}},
            "/api/v1/namespaces/flyte/configmaps": settings(helm_values()),
        }
        self.api.objects.update(objects)
        self.run = folder / "run.yaml"
        self.write(POOLS)

    def write(self, pools):
        document = yaml.safe_load((ROOT / "examples/demo.yaml").read_text(encoding="utf-8"))
        document["run"]["url"] = str(self.folder / "store")
        self.run.write_text(yaml.safe_dump(document | {"pools": pools}), encoding="utf-8")

    def doctor(self, *arguments):
        """Exit status, and the findings by name; a name that stands twice has both."""
        with admin_server(self.folder, self.admin) as config, api_server(self.folder, self.api):
            return told(config, *(arguments or (self.run,)))


def told(config, *arguments):
    command = ["doctor", "--cluster", str(config), "--project", "gleaner", *map(str, arguments)]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    assert TOKEN not in result.output
    lines = [line.split(": ", 1) for line in result.stdout.splitlines()]
    found = {}
    for name, *said in lines:
        found[name] = f"{found[name]}; {said[0]}" if name in found else "".join(said)
    return result.exit_code, found


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    for name in ("FLYTE_PLATFORM_URL", "FLYTE_PLATFORM_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    return Place(tmp_path)


def wrong(found):
    return {name: said for name, said in found.items() if said.startswith("WRONG")}


def test_a_cluster_that_has_everything(place):
    code, found = place.doctor()
    assert (code, wrong(found)) == (0, {})
    assert found["Flyte"].startswith("v1.16.8 at ")
    assert found["registered versions"] == "2 of workflows.training.training, the newest is 8"
    assert found["task_resources.limits"].endswith("from Flyte's configuration")
    assert found["queue spot"] == "there, for pools.rollout"
    assert found["quota team"] == "cpu 64, pods 20"
    assert found["store, a second create is refused"] == "1 key"
    assert "nothing is wrong" in found
    assert "config map perhaps" not in found


def test_secrets_are_looked_up_without_their_content(place):
    place.doctor()
    [accepted] = [kind for path, kind in place.api.seen if path == f"{NAMESPACE}/secrets/word"]
    assert "PartialObjectMetadata" in accepted


MISSING = {
    f"{NAMESPACE}/podtemplates/gpu": ("pod template gpu", "neither in namespace gleaner-development nor in flyte"),
    f"{NAMESPACE}/configmaps/models": ("config map models", "not in namespace gleaner-development"),
    f"{NAMESPACE}/secrets/word": ("secret word", "not in namespace"),
    f"{QUEUES}/spot": ("queue spot", "no LocalQueue in namespace gleaner-development"),
    "/apis/kueue.x-k8s.io": ("queue spot", "Kueue is not installed"),
    NAMESPACE: ("namespace gleaner-development", "not there: Flyte makes it"),
}


@pytest.mark.parametrize("path", MISSING)
def test_what_is_missing_is_wrong_and_what_is_forbidden_is_not_readable(place, path):
    name, reason = MISSING[path]
    had = place.api.objects.pop(path)
    code, found = place.doctor()
    assert (code, list(wrong(found))) == (1, [name])
    assert reason in found[name]
    assert found["wrong"] == "1 of these"
    place.api.objects[path] = had
    place.api.forbidden.add(path)
    code, found = place.doctor()
    assert (code, wrong(found)) == (0, {})
    title = "namespace" if path == NAMESPACE else name
    assert re.fullmatch(rf"not readable: http://\S+ says 403 to GET {path}", found[title])
    assert found["nothing read is wrong; not readable"] == "1"


def test_a_pod_template_of_flytes_namespace_is_found(place):
    place.api.objects["/api/v1/namespaces/flyte/podtemplates/gpu"] = place.api.objects.pop(
        f"{NAMESPACE}/podtemplates/gpu"
    )
    assert place.doctor()[0] == 0


def test_a_pod_template_without_the_magic_container_is_wrong(place):
    place.api.objects[f"{NAMESPACE}/podtemplates/gpu"] = pod_template("main", "sidecar")
    code, found = place.doctor()
    assert code == 1
    assert "no container is called default or primary" in found["pod template gpu"]


def test_a_queue_that_is_not_active_is_wrong(place):
    inactive = {"type": "Active", "status": "False", "message": "ClusterQueue\nis stopped"}
    place.api.objects[f"{QUEUES}/spot"] = {"status": {"conditions": [inactive]}}
    code, found = place.doctor()
    assert code == 1
    assert "ClusterQueue is stopped (pools.rollout)" in found["queue spot"]


@pytest.mark.parametrize(
    ("hard", "reason"),
    [
        ({"requests.memory": "32Gi"}, "less than one pod of pools.train"),
        ({"requests.nvidia.com/gpu": "0"}, "less than one pod of pools.train"),
        ({"cpu": "9"}, "and an iteration asks for 10 at once"),
        ({"limits.memory": "80Gi"}, "and an iteration asks for 92Gi at once"),
        ({"count/pods": "3"}, "and an iteration asks for 4 at once"),
    ],
)
def test_a_quota_that_is_too_small_is_wrong(place, hard, reason):
    place.api.objects[f"{NAMESPACE}/resourcequotas"] = {"items": [quota("small", **hard), quota("other")]}
    code, found = place.doctor()
    assert (code, list(wrong(found))) == (1, ["quota small"])
    assert reason in found["quota small"]


def test_limits_of_the_project_go_before_those_of_the_configuration_and_the_narrowest_before_wider_ones(place):
    large = {"cpu": "64", "memory": "500Gi", "gpu": "8"}
    place.admin.limits = [
        {"limits": large | {"cpu": "2"}},
        {"project": "other", "limits": {"memory": "1Gi"}},
        {"project": "gleaner", "domain": "development", "limits": {"cpu": "64", "memory": "8Gi"}},
        {"project": "gleaner", "limits": large | {"gpu": "0"}},
    ]
    code, found = place.doctor()
    limits = found["task_resources.limits"]
    assert code == 1
    assert "pools.train asks for memory 64Gi, the limit is 8Gi (set for the project)" in limits
    assert "cpu" not in limits
    assert "gpu" not in limits
    place.admin.limits.append(
        {"project": "gleaner", "domain": "development", "workflow": "workflows.training.training", "limits": large}
    )
    assert place.doctor()[0] == 0


def test_without_limits_in_its_configuration_flyte_has_its_own(place):
    document = helm_values()
    del document["task_resources"]
    place.api.objects["/api/v1/namespaces/flyte/configmaps"] = settings(document)
    code, found = place.doctor()
    assert code == 1
    assert "pools.rollout asks for cpu 3, the limit is 2 (from Flyte's configuration)" in found["task_resources.limits"]


def changed(path, value):
    document = helm_values()
    section = document
    *outer, last = path.split("/")
    for part in outer:
        section = section[part]
    section.pop(last)
    if value is not None:
        section[last] = value
    return settings(document)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("plugins/k8s/pod-pending-timeout", None, "off: pods that never get a machine"),
        ("plugins/k8s/pod-pending-timeout", "0s", "off"),
        ("plugins/k8s/interruptible-node-selector-requirement", None, "members run wherever"),
        ("plugins/k8s/non-interruptible-node-selector-requirement", None, "the trainer may get a spot machine"),
        ("propeller/node-config/max-node-retries-system-failures", 2, "fewer lost machines"),
        ("propeller/max-workflow-retries", 30, "30: so many refusals of Flyte's store in an execution's life end it"),
        ("propeller/queue/queue/base-delay", None, "0s: the refusals of Flyte's store"),
        ("propeller/queue/queue/max-delay", "500ms", "set 2s or more"),
        ("propeller/node-config/interruptible-failure-threshold", 1, "leave it at -1"),
        ("storage/limits/maxDownloadMBs", 1, "executions of many iterations fail"),
        ("storage/cache/max_size_mbs", 10, "compiled again at every look"),
        ("tasks/task-plugins/enabled-plugins", ["sidecar"], "without container"),
    ],
)
def test_each_setting_of_flyte_that_would_hurt_is_wrong(place, path, value, reason):
    place.api.objects["/api/v1/namespaces/flyte/configmaps"] = changed(path, value)
    code, found = place.doctor()
    assert (code, list(wrong(found))) == (1, [path.replace("/", ".").lower()])
    assert reason in wrong(found)[path.replace("/", ".").lower()]


def policies():
    [body] = re.findall(r"^<!-- network policy -->\n```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return list(yaml.safe_load_all(body))


def on_two_nodes(place):
    document = yaml.safe_load(place.run.read_text()) | {"trainer": {"nnodes": 2}}
    place.run.write_text(yaml.safe_dump(document))
    place.api.objects["/apis/kubeflow.org"] = {"kind": "APIGroup"}


def test_the_trainer_of_one_node_needs_no_network_policy(place):
    assert "network policy" not in place.doctor()[1]


def test_several_nodes_need_a_network_policy_and_the_one_of_the_guide_is_enough(place):
    on_two_nodes(place)
    code, found = place.doctor()
    assert (code, list(wrong(found))) == (1, ["network policy"])
    assert "no NetworkPolicy holds for the trainer's pods, so what reaches them can run code" in found["network policy"]
    assert "docs/guide/platform.md" in found["network policy"]
    place.api.objects[POLICIES] = {"items": policies()}
    code, found = place.doctor()
    assert (code, found["network policy"]) == (0, "the trainer's pods alone reach each other")
    place.api.forbidden.add(POLICIES)
    code, found = place.doctor()
    assert (code, found["network policy"].partition(":")[0]) == (0, "not readable")


def test_several_nodes_need_the_operator_and_the_plugin(place):
    on_two_nodes(place)
    del place.api.objects["/apis/kubeflow.org"]
    place.api.objects[POLICIES] = {"items": policies()}
    place.api.objects["/api/v1/namespaces/flyte/configmaps"] = changed(
        "tasks/task-plugins/enabled-plugins", ["container"]
    )
    code, found = place.doctor()
    assert code == 1
    assert set(wrong(found)) == {"training operator", "tasks.task-plugins.enabled-plugins"}
    place.api.objects["/apis/kubeflow.org"] = {"kind": "APIGroup"}
    assert set(wrong(place.doctor()[1])) == {"tasks.task-plugins.enabled-plugins"}


def test_a_project_without_the_workflow_and_other_names(place):
    place.admin.versions = {}
    code, found = place.doctor()
    assert (code, list(wrong(found))) == (1, ["registered versions"])
    assert "register it (pyflyte register)" in found["registered versions"]
    _, found = place.doctor(place.run, "--project", "nosuch")
    assert "no project 'nosuch'; name another with --project: gleaner" in found["project"]
    _, found = place.doctor(place.run, "--domain", "staging")
    assert "no domain 'staging'; name another with --domain: development, production" in found["project"]


def test_what_flyte_does_not_show_is_not_readable(place):
    place.admin.denied = {"GetVersion", "ListProjects", "ListWorkflows", "ListMatchableAttributes"}
    code, found = place.doctor()
    assert (code, wrong(found)) == (0, {})
    unread = ("Flyte", "project", "registered versions", "task_resources.limits")
    assert all(found[name].startswith("not readable: ") and "PERMISSION_DENIED" in found[name] for name in unread)
    assert found["nothing read is wrong; not readable"] == "4"


def test_a_flyte_that_does_not_answer_is_wrong(place, tmp_path):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        with api_server(place.folder, place.api):
            code, found = told(flyte_config(tmp_path, port), place.run)
    assert code == 1
    assert f"127.0.0.1:{port} says UNAVAILABLE; correct url" in wrong(found)["Flyte"]
    assert found["task_resources.limits"].startswith("not readable: ")
    assert found["queue spot"].startswith("there")


def test_without_kubernetes_and_without_a_configuration_nothing_of_them_is_called_good(place, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(place.folder / "nosuch"))
    with admin_server(place.folder, place.admin) as config:
        code, found = told(config)
    assert (code, wrong(found)) == (0, {})
    assert found["Kubernetes"].startswith("not readable: no context of Kubernetes: ")
    assert "those of Flyte's configuration hold, unseen" in found["task_resources.limits"]
    assert found["store"].startswith("not readable: ")
    assert found["nothing read is wrong; not readable"] == "3"


def test_a_kubernetes_that_does_not_answer_or_know_us_is_not_readable(place, tmp_path):
    with socket.socket() as reserved, admin_server(place.folder, place.admin) as config:
        reserved.bind(("127.0.0.1", 0))
        kubeconfig(tmp_path, reserved.getsockname()[1])
        code, found = told(config, place.run)
    assert (code, wrong(found)) == (0, {})
    assert "gives no answer" in found["Kubernetes"]
    assert "queue spot" not in found
    with admin_server(place.folder, place.admin) as config, api_server(place.folder, place.api) as file:
        file.write_text(file.read_text().replace(TOKEN, "stale"))
        code, found = told(config, place.run)
    assert (code, wrong(found)) == (0, {})
    assert "says 401" in found["Kubernetes"]


def test_another_context_can_be_named(place):
    _, found = place.doctor(place.run, "--kube-context", "nosuch")
    assert found["Kubernetes"].startswith("not readable: no context of Kubernetes: ")
    _, found = place.doctor(place.run, "--kube-context", "test", "--namespace", "elsewhere")
    assert "v1.34.1, context test at http://127.0.0.1" in found["Kubernetes"]
    assert "not in namespace elsewhere" in found["secret word"]


def test_a_store_that_cannot_be_used_is_wrong(place):
    (place.folder / "store").write_bytes(b"")
    code, found = place.doctor()
    assert (code, list(wrong(found))) == (1, ["store"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run.yaml",), "CONFIG with --cluster"),
        (("--gpus", "1", "--cluster", "flyte.config"), "allowed: one of them"),
    ],
)
def test_options_that_exclude_each_other(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    for name in ("run.yaml", "flyte.config"):
        (tmp_path / name).write_text("")
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
