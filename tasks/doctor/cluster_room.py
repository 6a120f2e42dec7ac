"""Compares the requests of the pools' pods with Flyte's limits and the namespace's quotas."""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from resources.pools import PoolConfig
from resources.quantities import amount
from storage.records.fitness import Finding
from tasks.doctor.cluster import WORKFLOW, Admin, Cluster, ClusterDemand, ClusterTarget, Unread

LIMITS = "task_resources.limits"
GPU = "nvidia.com/gpu"
# What a quota may bound, by the resource that pods request and are limited to alike.
_BOUNDS = {
    "cpu": ("cpu", "requests.cpu", "limits.cpu"),
    "memory": ("memory", "requests.memory", "limits.memory"),
    "gpu": (f"requests.{GPU}", f"limits.{GPU}"),
    "pods": ("pods", "count/pods"),
}


def needs(pool: PoolConfig) -> dict[str, tuple[Fraction, str]]:
    """(number, text) of each resource that a pod of the pool requests, by Flyte's name of the resource."""
    requests = {"cpu": pool.cpu, "memory": pool.memory, "gpu": str(pool.gpus)}
    return {name: (amount(text), text) for name, text in requests.items()}


def limit_findings(
    admin: Admin, place: ClusterTarget, demand: ClusterDemand, configured: Callable[[], Mapping[str, Any] | None]
) -> Iterator[Finding]:
    """Findings about Flyte's limits and the pools' requests.

    configured: function that returns the limits in Flyte's own configuration, which hold for a project without limits;
    None if not readable.
    """
    limits: Mapping[str, Any] | None = admin.limits(place.project, place.domain, WORKFLOW)
    source = "set for the project"
    if limits is None:
        limits, source = configured(), "from Flyte's configuration"
    if limits is None:
        shown = "not readable: none are set for the project; those of Flyte's configuration hold, unseen"
        yield Unread(LIMITS, f"{shown} (default: cpu 2, memory 1Gi, gpu 1)")
        return
    shown = ", ".join(f"{name} {value}" for name, value in limits.items()) or "none"
    lacks = list(_caps(limits, demand))
    if not lacks:
        yield Finding(LIMITS, f"{shown}, {source}")
    for lack in lacks:
        yield Finding(LIMITS, shown, f"{lack} ({source}): raise the limit, or Flyte caps the pods without a word")


def _caps(limits: Mapping[str, Any], demand: ClusterDemand) -> Iterator[str]:
    for path, pool in demand.named_pools().items():
        for name, (need, text) in needs(pool).items():
            if name in limits and need > amount(str(limits[name])):
                yield f"{path} asks for {name} {text}, the limit is {limits[name]}"


def quota_findings(cluster: Cluster, place: ClusterTarget, demand: ClusterDemand) -> Iterator[Finding]:
    """A finding for each quota: the quota must hold the largest pod, and should hold all pods of an iteration."""
    listed = cluster.get(f"/api/v1/namespaces/{place.namespace}/resourcequotas")
    quotas = (listed or {}).get("items", [])
    if not quotas:
        yield Finding("quotas", f"none in namespace {place.namespace}")
    for quota in quotas:
        hard = {name: str(value) for name, value in (quota.get("spec", {}).get("hard") or {}).items()}
        title = f"quota {quota['metadata']['name']}"
        lacks = list(_shortages(hard, demand))
        if not lacks:
            yield Finding(title, ", ".join(f"{name} {value}" for name, value in hard.items()) or "bounds nothing")
        for lack in lacks:
            yield Finding(title, "", lack)


def _shortages(hard: Mapping[str, str], demand: ClusterDemand) -> Iterator[str]:
    pools = demand.named_pools()
    for resource, names in _BOUNDS.items():
        for name in names:
            if name not in hard:
                continue
            bound, total = amount(hard[name]), Fraction(0)
            too_large = []
            for path, pool in pools.items():
                need = Fraction(1) if resource == "pods" else needs(pool)[resource][0]
                total += need * min(pool.count, pool.concurrency or pool.count)
                too_large += [path] if need > bound else []
            if too_large:
                yield f"{name} is {hard[name]}, less than one pod of {', '.join(too_large)}: raise it, or ask for less"
            elif total > bound:
                yield (
                    f"{name} is {hard[name]}, and an iteration asks for {_shown(resource, total)} at once, so members "
                    "wait for each other: raise it, or lower count"
                )


def _shown(resource: str, total: Fraction) -> str:
    return f"{float(total) / (1 << 30):.3g}Gi" if resource == "memory" else f"{float(total):.6g}"
