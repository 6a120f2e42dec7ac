"""The examination of a cluster for `gleaner doctor --cluster`: what would hurt a run there, as findings.

It asks Flyte's admin API and a Kubernetes API server through the interfaces below, and only reads. What may not be read
is never called good.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from resources.cluster_errors import NoAnswer, NotReadable
from resources.pools import PoolConfig, PoolsConfig, pool_path
from storage.stores.connect import connect
from storage.stores.fitness import Finding, prove
from storage.stores.store import StorageError
from tasks.configuration.run_config import RunConfig
from tasks.configuration.schedules import ScheduledRun
from tasks.configuration.trainer import TrainerConfig

WORKFLOW = "workflows.training.training"
# Enough to catch a server that ignores the condition; `gleaner check --store` is the thorough proof.
STORE_KEYS, STORE_LISTED = 10, 20


@dataclass(frozen=True)
class Unread(Finding):
    """Something that may not be read, or is not there to be read; `shown` says why."""


@dataclass(frozen=True, kw_only=True)
class ClusterTarget:
    """Where a run would be: project and domain of Flyte, the namespace of its pods, and that of Flyte itself."""

    project: str
    domain: str
    namespace: str
    flyte_namespace: str


@dataclass(frozen=True, kw_only=True)
class ClusterDemand:
    """What a run asks of a cluster. store_url: None if it is not to be tried; settings: None without a configuration.

    scheduled: the runs that shall have launch plans, by their names; None where nothing says which.
    """

    pools: PoolsConfig
    trainer: TrainerConfig
    store_url: str | None = None
    settings: RunConfig | None = None
    scheduled: Mapping[str, tuple[ScheduledRun, RunConfig]] | None = None

    def named_pools(self) -> dict[str, PoolConfig]:
        """All pools by the path of their section."""
        own = {"train": self.pools.train, "control": self.pools.control}
        return {pool_path(name): pool for name, pool in {**self.pools.rollout_pools, **own}.items()}


class Versions(Protocol):
    """The registered versions of a workflow."""

    @property
    def count(self) -> int: ...
    @property
    def newest(self) -> str: ...


class Plan(Protocol):
    """A launch plan whose schedule is on."""

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
    """A Kubernetes API server; `get` gives None for what is not there, and raises NotReadable."""

    def get(self, path: str, *, metadata_only: bool = False) -> dict[str, Any] | None: ...


def looked_at(name: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of `look`; one that says so where it may not read on."""
    try:
        yield from look()
    except NotReadable as error:
        yield Unread(name, f"not readable: {error}")


def flyte_findings(admin: Admin, place: ClusterTarget) -> Iterator[Finding]:
    """The admin API itself, the project, and whether its workflow is registered."""
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
    """Whether the store can hold a run, with the credentials of this machine."""
    proof = prove(connect(url), keys=STORE_KEYS, listed=STORE_LISTED)
    try:
        for finding in proof:
            yield replace(finding, name=f"store, {finding.name}")
    except StorageError as error:
        yield Finding("store", url, f"{error}")
    finally:
        proof.close()
