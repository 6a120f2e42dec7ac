"""Compares Flyte's own configuration, read from ConfigMaps in Flyte's namespace, with docs/guide/platform.md."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from resources.cluster_errors import NotReadable
from storage.records.fitness import Finding
from tasks.doctor.cluster import Cluster, ClusterDemand, ClusterTarget

PENDING = "plugins.k8s.pod-pending-timeout"
SPOT = "plugins.k8s.interruptible-node-selector-requirement"
RESERVED = "plugins.k8s.non-interruptible-node-selector-requirement"
SYSTEM_RETRIES = "propeller.node-config.max-node-retries-system-failures"
ROUNDS = "propeller.max-workflow-retries"
DELAY, DELAY_MAX = "propeller.queue.queue.base-delay", "propeller.queue.queue.max-delay"
THRESHOLD = "propeller.node-config.interruptible-failure-threshold"
DOWNLOAD = "storage.limits.maxdownloadmbs"
CACHE = "storage.cache.max_size_mbs"
PLUGINS = "tasks.task-plugins.enabled-plugins"
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")
_S_OF = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
Judge = Callable[[Any, ClusterDemand], str | None]


def flyte_settings(cluster: Cluster, place: ClusterTarget) -> dict[str, Any]:
    """All settings in the ConfigMaps of Flyte's namespace, merged, with keys in small letters.

    Raises NotReadable, also without a ConfigMap of settings.
    """
    listed = cluster.get(f"/api/v1/namespaces/{place.flyte_namespace}/configmaps")
    settings: dict[str, Any] = {}
    for each in sorted((listed or {}).get("items", []), key=lambda found: str(found["metadata"]["name"])):
        for _, text in sorted((each.get("data") or {}).items()):
            try:
                document = yaml.safe_load(text)
            except yaml.YAMLError:
                continue  # not a file of settings
            if isinstance(document, dict):
                _merge(settings, document)
    if not any(section in settings for section in ("propeller", "plugins", "tasks", "storage", "task_resources")):
        raise NotReadable(f"no configuration of Flyte among the ConfigMaps of namespace {place.flyte_namespace}")
    return settings


def setting(settings: Mapping[str, Any], path: str) -> Any:
    """The value at a path in small letters; None: not set."""
    value: Any = settings
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def configured_limits(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """task_resources.limits, with Flyte's defaults for missing limits."""
    return {"cpu": "2", "memory": "1Gi", "gpu": "1"} | (setting(settings, "task_resources.limits") or {})


def setting_findings(settings: Mapping[str, Any], demand: ClusterDemand) -> Iterator[Finding]:
    """A finding for each setting in docs/guide/platform.md."""
    for path, judge in JUDGES.items():
        value = setting(settings, path)
        shown = "Flyte's default" if value is None else " ".join(str(value).split())[:120]
        yield Finding(path, shown, judge(value, demand))


def _merge(settings: dict[str, Any], document: Mapping[Any, Any]) -> None:
    """Merge a document into the settings, section by section; the document's values replace earlier values."""
    for key, value in document.items():
        name = str(key).lower()
        if isinstance(value, Mapping):
            inner = settings[name] if isinstance(settings.get(name), dict) else {}
            settings[name] = inner
            _merge(inner, value)
        else:
            settings[name] = value


def _seconds(text: str) -> float:
    return sum(float(number) * _S_OF[unit] for number, unit in _SECONDS.findall(text))


def _pending(value: Any, _demand: ClusterDemand) -> str | None:
    if value is not None and _seconds(str(value)) > 0:
        return None
    return "off: pods that never get a machine keep an execution open for ever; set it to hours, such as 6h"


def _spot(value: Any, demand: ClusterDemand) -> str | None:
    if value or not any(pool.interruptible for pool in demand.named_pools().values()):
        return None
    return "not set: members run wherever Kubernetes puts them, not on spot machines; set the label of your spot nodes"


def _reserved(value: Any, _demand: ClusterDemand) -> str | None:
    return None if value else "not set: the trainer may get a spot machine; set that a node is not one"


def _at_least(least: int, default: int, harm: str) -> Judge:
    def judge(value: Any, _demand: ClusterDemand) -> str | None:
        found = int(default if value is None else value)
        return None if found >= least else f"{found}: {harm}; set {least} or more"

    return judge


def _lasts(least: str, default: str, harm: str) -> Judge:
    def judge(value: Any, _demand: ClusterDemand) -> str | None:
        found = str(default if value is None else value)
        return None if _seconds(found) >= _seconds(least) else f"{found}: {harm}; set {least} or more"

    return judge


def _threshold(value: Any, _demand: ClusterDemand) -> str | None:
    if value is None or int(value) == -1:
        return None
    return f"{value}: the last attempt of a slot need not be on a reserved machine; leave it at -1"


def _cache(value: Any, _demand: ClusterDemand) -> str | None:
    if value is None or int(value) == 0 or int(value) >= 2048:
        return None
    return f"{value}: larger workflows than 1/1,024 of it are compiled again at every look; set 0, or 2048 and more"


def _plugins(value: Any, demand: ClusterDemand) -> str | None:
    if value is None:
        return None
    wanted = {"container"} | ({"pytorch"} if demand.trainer.nnodes > 1 else set())
    missing = ", ".join(sorted(wanted - {str(each) for each in value}))
    return f"without {missing}, whose tasks do not start; add it" if missing else None


JUDGES: dict[str, Judge] = {
    PENDING: _pending,
    SPOT: _spot,
    RESERVED: _reserved,
    SYSTEM_RETRIES: _at_least(3, 3, "fewer lost machines end a slot for good"),
    # Together: an execution outlives refusals of Flyte's store for three minutes, in all of its life.
    ROUNDS: _at_least(100, 10, "so many refusals of Flyte's store in an execution's life end it"),
    DELAY: _lasts("100ms", "0s", "the refusals of Flyte's store that end an execution take seconds"),
    DELAY_MAX: _lasts("2s", "60s", "the refusals of Flyte's store that end an execution take seconds"),
    THRESHOLD: _threshold,
    DOWNLOAD: _at_least(2, 2, "executions of many iterations fail"),
    CACHE: _cache,
    PLUGINS: _plugins,
}
