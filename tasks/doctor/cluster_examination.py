"""The examination of a whole cluster: Flyte's admin API, Kubernetes, Flyte's configuration and the store, in turn."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from resources.cluster_errors import NotReadable
from resources.flyte_admin import FlyteAdmin
from resources.kubernetes_api import KubernetesApi
from resources.pools import PoolsConfig
from storage.records.fitness import Finding
from tasks.configuration.run_config import RunConfig
from tasks.configuration.schedules import environment_runs
from tasks.configuration.trainer import TrainerConfig
from tasks.doctor.active_plans import plan_findings
from tasks.doctor.cluster import (
    Cluster,
    ClusterDemand,
    ClusterTarget,
    Unread,
    flyte_findings,
    looked_at,
    store_findings,
)
from tasks.doctor.cluster_objects import kubernetes_findings
from tasks.doctor.cluster_room import LIMITS, limit_findings, quota_findings
from tasks.doctor.flyte_settings import configured_limits, flyte_settings, setting_findings


def examine_cluster(
    flyte_config: Path, settings: RunConfig | None, place: ClusterTarget, kube_context: str | None
) -> Iterator[Finding]:
    """Examine a cluster: a fit cluster has no finding with a lack.

    settings: the run's; None examines the default pools, and tests no store.
    """
    demand = _demand_of(settings)
    admin = FlyteAdmin(flyte_config)
    yield from flyte_findings(admin, place)
    yield from looked_at("launch plans", lambda: plan_findings(admin, place, demand))
    try:
        cluster = KubernetesApi(kube_context)
        release = cluster.release()
    except NotReadable as error:
        yield from looked_at(LIMITS, lambda: limit_findings(admin, place, demand, lambda: None))
        yield Unread("Kubernetes", f"not readable: {error}")
    else:
        yield Finding("Kubernetes", f"{release}, context {cluster.context} at {cluster.server}")
        yield from _with_kubernetes(admin, cluster, place, demand)
        cluster.close()
    if demand.store_url is None:
        yield Unread("store", "not readable: name the run's configuration to try its store")
    else:
        yield from store_findings(demand.store_url)


def _with_kubernetes(
    admin: FlyteAdmin, cluster: Cluster, place: ClusterTarget, demand: ClusterDemand
) -> Iterator[Finding]:
    settings: dict[str, Any] | None
    try:
        settings, why = flyte_settings(cluster, place), ""
    except NotReadable as error:
        settings, why = None, str(error)

    def configured() -> Mapping[str, Any] | None:
        return None if settings is None else configured_limits(settings)

    yield from looked_at(LIMITS, lambda: limit_findings(admin, place, demand, configured))
    if settings is None:
        yield Unread("settings of Flyte", f"not readable: {why}")
    else:
        yield from setting_findings(settings, demand)
    yield from kubernetes_findings(cluster, place, demand)
    yield from looked_at("quotas", lambda: quota_findings(cluster, place, demand))


def _demand_of(settings: RunConfig | None) -> ClusterDemand:
    scheduled = environment_runs(os.environ) or None
    if settings is None:
        return ClusterDemand(pools=PoolsConfig(), trainer=TrainerConfig(), scheduled=scheduled)
    return ClusterDemand(
        pools=settings.pools,
        trainer=settings.trainer,
        store_url=settings.run.url,
        settings=settings,
        scheduled=scheduled,
    )
