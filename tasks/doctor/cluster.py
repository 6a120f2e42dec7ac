"""The examination of a cluster for `gleaner doctor --cluster`: problems for a run, as findings.

Flyte's admin API and a Kubernetes API server are read through the interfaces below, and never written. An object that
cannot be read is never called good.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from resources.cluster_errors import NoAnswer, NotReadable
from resources.pools import PoolConfig, PoolsConfig
from storage.records.fitness import Finding, prove
from storage.stores.connect import connect
from storage.stores.store import StorageError
from tasks.configuration.run_config import RunConfig
from tasks.configuration.schedules import ScheduledRun
from tasks.configuration.trainer import TrainerConfig

WORKFLOW = "workflows.training.training"
# Enough to catch a server that ignores the condition; `gleaner check --store` is the thorough proof.
STORE_KEYS, STORE_LISTED = 10, 20


@dataclass(frozen=True)
class Unread(Finding):
    """An object that cannot be read, or does not exist; `shown` has the reason."""


@dataclass(frozen=True, kw_only=True)
class ClusterTarget:
    """The place of a run in a cluster.

    Attributes:
        project: project of Flyte.
        domain: domain of Flyte.
        namespace: namespace of the run's pods.
        flyte_namespace: namespace of Flyte itself.
    """

    project: str
    domain: str
    namespace: str
    flyte_namespace: str


@dataclass(frozen=True, kw_only=True)
class ClusterDemand:
    """The demands of a run on a cluster.

    Attributes:
        pools: pools of the run.
        trainer: section `trainer` of the configuration.
        store_url: store to test; None: no test.
        settings: configuration of the run; None without a configuration.
        scheduled: (schedule, configuration) of each run that should have a launch plan, by name; None if unknown.
    """

    pools: PoolsConfig
    trainer: TrainerConfig
    store_url: str | None = None
    settings: RunConfig | None = None
    scheduled: Mapping[str, tuple[ScheduledRun, RunConfig]] | None = None

    def named_pools(self) -> dict[str, PoolConfig]:
        """All pools by the path of their section."""
        return self.pools.by_path


class Versions(Protocol):
    """The registered versions of a workflow."""

    @property
    def count(self) -> int: ...
    @property
    def newest(self) -> str: ...


class Plan(Protocol):
    """A launch plan with an active schedule."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def schedule(self) -> str: ...
    @property
    def settings_digest(self) -> str: ...
    @property
    def inputs(self) -> dict[str, Any]: ...


class Admin(Protocol):
    """Flyte's admin API; every method raises NotReadable."""

    endpoint: str

    def release(self) -> str: ...
    def domains(self) -> dict[str, list[str]]: ...
    def registered(self, project: str, domain: str, workflow: str) -> Versions | None: ...
    def active_plans(self, project: str, domain: str, workflow: str) -> Sequence[Plan]: ...
    def limits(self, project: str, domain: str, workflow: str) -> dict[str, str] | None: ...


class Cluster(Protocol):
    """A Kubernetes API server; `get` returns None for a missing object, and raises NotReadable."""

    def get(self, path: str, *, metadata_only: bool = False) -> dict[str, Any] | None: ...


def looked_at(name: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of `look`, ended by an Unread finding if `look` raises NotReadable."""
    try:
        yield from look()
    except NotReadable as error:
        yield Unread(name, f"not readable: {error}")


def flyte_findings(admin: Admin, place: ClusterTarget) -> Iterator[Finding]:
    """Findings about the admin API, the project, and the registered versions of the workflow."""
    try:
        yield Finding("Flyte", f"{admin.release()} at {admin.endpoint}")
    except NoAnswer as error:
        advice = "correct url in the section platform of the configuration file, or FLYTE_PLATFORM_URL"
        yield Finding("Flyte", "", f"{error}; {advice}")
        return
    except NotReadable as error:
        yield Unread("Flyte", f"not readable: {error}")
    yield from looked_at("project", lambda: [_project(admin.domains(), place)])
    yield from looked_at("registered versions", lambda: [_registered(admin, place)])


def _project(domains: dict[str, list[str]], place: ClusterTarget) -> Finding:
    shown = f"{place.project}, domain {place.domain}"
    if place.project not in domains:
        found = ", ".join(sorted(domains)) or "none"
        return Finding("project", shown, f"no project {place.project!r}; name another with --project: {found}")
    if place.domain not in domains[place.project]:
        found = ", ".join(domains[place.project]) or "none"
        return Finding("project", shown, f"no domain {place.domain!r}; name another with --domain: {found}")
    return Finding("project", shown)


def _registered(admin: Admin, place: ClusterTarget) -> Finding:
    found = admin.registered(place.project, place.domain, WORKFLOW)
    if found is None:
        lack = f"{WORKFLOW} is not in {place.project}, {place.domain}: register it (pyflyte register), or run --remote"
        return Finding("registered versions", "", lack)
    return Finding("registered versions", f"{found.count} of {WORKFLOW}, the newest is {found.newest}")


def store_findings(url: str) -> Iterator[Finding]:
    """Findings about the store's fitness for a run, with the credentials of this machine."""
    proof = prove(connect(url), keys=STORE_KEYS, listed=STORE_LISTED)
    try:
        for finding in proof:
            yield replace(finding, name=f"store, {finding.name}")
    except StorageError as error:
        yield Finding("store", url, f"{error}")
    finally:
        proof.close()
