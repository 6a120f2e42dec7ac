"""The objects of a Kubernetes namespace that the pools name: pod templates, queues, config maps, secrets.

If a named object is missing in the namespace, the pool's pods wait for ever, or are refused.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from resources.cluster_errors import NotReadable
from resources.labels import QUEUE_LABEL
from resources.pools import PoolConfig
from storage.records.fitness import Finding
from tasks.doctor.cluster import Cluster, ClusterDemand, ClusterTarget, Unread, looked_at
from tasks.doctor.network_policies import NAME, policy_finding

# Flyte takes what a pod template says of containers from those with these names.
MAGIC_NAMES = ("default", "primary")
KUEUE = "/apis/kueue.x-k8s.io"
TRAINING_OPERATOR = "/apis/kubeflow.org"
_OF_VARIABLES = (
    ("configMapKeyRef", "name", "config map", "configmaps"),
    ("secretKeyRef", "name", "secret", "secrets"),
)
Look = Callable[[Cluster, ClusterTarget, str], str | None]


def kubernetes_findings(cluster: Cluster, place: ClusterTarget, demand: ClusterDemand) -> Iterator[Finding]:
    """Findings about the namespace and every object that the pools name."""
    yield from looked_at("namespace", lambda: [_namespace(cluster, place)])
    if demand.trainer.nnodes > 1:
        yield from looked_at("training operator", lambda: [_training_operator(cluster)])
        yield from looked_at(NAME, lambda: [policy_finding(cluster, place, demand)])
    looks: dict[tuple[str, str], tuple[Look, list[str]]] = {}
    for path, pool in demand.named_pools().items():
        for kind, name, look in named_objects(pool, demand.pools.labels):
            looks.setdefault((kind, name), (look, []))[1].append(path)
    for (kind, name), (look, paths) in looks.items():
        yield _looked_up(cluster, place, kind, name, look, paths)


def named_objects(pool: PoolConfig, labels: Mapping[str, str | None]) -> Iterator[tuple[str, str, Look]]:
    """(kind, name, function that returns the problem of the object) of each object that a pool's pods need.

    labels: of the pods of all pools.
    """
    if pool.pod_template:
        yield "pod template", pool.pod_template, _pod_template
    if queue := {**labels, **pool.labels}.get(QUEUE_LABEL):
        yield "queue", queue, _queue
    for source, names in _sources(pool):
        named = source.get(names[0]) or {}
        if named.get(names[1]) and not named.get("optional"):
            kind, plural = names[2:]
            yield kind, named[names[1]], _namespaced(plural)


def _sources(pool: PoolConfig) -> Iterator[tuple[dict[str, Any], tuple[str, str, str, str]]]:
    """Each variable with each way in which it may name an object: field, its name, kind, plural."""
    for variable in pool.env:
        yield from ((variable.get("valueFrom") or {}, names) for names in _OF_VARIABLES)


def _looked_up(cluster: Cluster, place: ClusterTarget, kind: str, name: str, look: Look, paths: list[str]) -> Finding:
    title = f"{kind} {name}"
    try:
        lack = look(cluster, place, name)
    except NotReadable as error:
        return Unread(title, f"not readable: {error}")
    asking = ", ".join(dict.fromkeys(paths))
    return Finding(title, f"there, for {asking}", lack and f"{lack} ({asking})")


def _namespace(cluster: Cluster, place: ClusterTarget) -> Finding:
    found = cluster.get(f"/api/v1/namespaces/{place.namespace}")
    lack = "not there: Flyte makes it for a project and its domain; correct --project, --domain or --namespace"
    return Finding(f"namespace {place.namespace}", "there", None if found else lack)


def _training_operator(cluster: Cluster) -> Finding:
    lack = "not there: trainer.nnodes above 1 needs Kubeflow's training operator, else no pod of the trainer appears"
    return Finding("training operator", "there", None if cluster.get(TRAINING_OPERATOR) else lack)


def _in_namespace(place: ClusterTarget, plural: str, name: str, group: str = "/api/v1") -> str:
    return f"{group}/namespaces/{place.namespace}/{plural}/{name}"


def _namespaced(plural: str) -> Look:
    def look(cluster: Cluster, place: ClusterTarget, name: str) -> str | None:
        found = cluster.get(_in_namespace(place, plural, name), metadata_only=True)
        return None if found else f"not in namespace {place.namespace}: make it there, or name another"

    return look


def _pod_template(cluster: Cluster, place: ClusterTarget, name: str) -> str | None:
    found = cluster.get(_in_namespace(place, "podtemplates", name))
    if found is None:
        # Flyte looks in its own namespace, too.
        found = cluster.get(f"/api/v1/namespaces/{place.flyte_namespace}/podtemplates/{name}")
    if found is None:
        return f"neither in namespace {place.namespace} nor in {place.flyte_namespace}: make it, or name another"
    containers = found.get("template", {}).get("spec", {}).get("containers") or []
    if not {each.get("name") for each in containers} & set(MAGIC_NAMES):
        return (
            f"no container is called {' or '.join(MAGIC_NAMES)}, so Flyte takes nothing from its containers: rename one"
        )
    return None


def _queue(cluster: Cluster, place: ClusterTarget, name: str) -> str | None:
    group = cluster.get(KUEUE)
    if group is None:
        return "Kueue is not installed, so its label holds nothing back: install it, or leave the label out"
    version = group["preferredVersion"]["groupVersion"]
    queue = cluster.get(_in_namespace(place, "localqueues", name, f"/apis/{version}"))
    if queue is None:
        return f"no LocalQueue in namespace {place.namespace}, so pods wait for ever: make it, or name another"
    conditions: list[dict[str, Any]] = queue.get("status", {}).get("conditions") or []
    inactive = [each for each in conditions if each.get("type") == "Active" and each.get("status") == "False"]
    if inactive:
        reason = " ".join(str(inactive[0].get("message") or inactive[0].get("reason")).split())[:200]
        return f"not active, so pods wait for ever: {reason}"
    return None
