"""Whether a namespace lets anything but a trainer's own pods connect to them, which counts if it has several nodes.

Torch's launcher listens on every interface without a password, and unpickles what it is sent. Only policies of
networking.k8s.io/v1 are looked at.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from resources.labels import POOL_LABEL, RUN_LABEL, url_label
from storage.stores.fitness import Finding
from tasks.doctor.cluster import Cluster, ClusterDemand, ClusterTarget

NAME = "network policy"
GUIDE = "make the one in docs/guide/platform.md"
# Gloo and NCCL take any port that is free.
_FREE_PORTS = (1024, 65535)
_OPERATORS: dict[str, Callable[[str | None, list[str]], bool]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
}


def policy_finding(cluster: Cluster, place: ClusterTarget, asked: ClusterDemand) -> Finding:
    """Whether only the trainer's pods reach each other, and they do."""
    found = cluster.get(f"/apis/networking.k8s.io/v1/namespaces/{place.namespace}/networkpolicies") or {}
    train = trainer_labels(asked)
    lack = lack_of(found.get("items") or [], train)
    return Finding(NAME, "the trainer's pods alone reach each other", lack)


def trainer_labels(asked: ClusterDemand) -> dict[str, str]:
    """The labels of the trainer's pods that do not change."""
    run = {} if asked.store_url is None else {RUN_LABEL: url_label(asked.store_url)}
    asked_for = {**asked.pools.labels, **asked.pools.train.labels}
    return {**run, POOL_LABEL: "train", **{name: value or "" for name, value in asked_for.items()}}


def lack_of(policies: Iterable[Mapping[str, Any]], train: Mapping[str, str]) -> str | None:
    """What is wrong with a namespace's policies for a trainer whose pods have the labels `train`, if anything is."""
    ours = [
        each
        for each in policies
        if "Ingress" in each["spec"].get("policyTypes", ["Ingress"])
        and selects(each["spec"].get("podSelector") or {}, train)
    ]
    if not ours:
        return f"no NetworkPolicy holds for the trainer's pods, so what reaches them can run code there: {GUIDE}"
    # The pods of a rollout run the tools of the run, and another pod may have no label at all.
    others: tuple[Mapping[str, str], ...] = ({}, {**train, POOL_LABEL: "rollout"})
    for policy in ours:
        if any(_lets_in(peer, pod) for peer in _peers(policy) for pod in others):
            name = policy["metadata"]["name"]
            return f"{name} lets others than the trainer's pods connect to them, which can then run code there: {GUIDE}"
    if not any(_lets_in(peer, train) for policy in ours for peer in _peers(policy, ports=_FREE_PORTS)):
        return f"none lets the trainer's pods reach each other on all TCP ports, so they would wait for ever: {GUIDE}"
    return None


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector of Kubernetes selects an object with these labels; an empty one selects all."""
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(name) == value for name, value in wanted.items()) and all(
        _OPERATORS[each["operator"]](labels.get(each["key"]), each.get("values") or [])
        for each in selector.get("matchExpressions") or []
    )


def _peers(policy: Mapping[str, Any], ports: tuple[int, int] | None = None) -> Iterator[Mapping[str, Any] | None]:
    """Who may connect; None: all. ports: only those who may on all TCP ports between these."""
    for rule in policy["spec"].get("ingress") or []:
        if ports is None or not rule.get("ports") or any(_covers(each, *ports) for each in rule["ports"]):
            yield from rule.get("from") or [None]


def _covers(port: Mapping[str, Any], low: int, high: int) -> bool:
    first = port.get("port")
    if port.get("protocol", "TCP") != "TCP" or isinstance(first, str):
        return False
    return first is None or (first <= low and port.get("endPort", first) >= high)


def _lets_in(peer: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a pod of the namespace with these labels may connect; another namespace that is named is not judged."""
    if peer is None:
        return True
    if "ipBlock" in peer:
        # An address says nothing of who has it.
        return True
    if peer.get("namespaceSelector"):
        return False
    return selects(peer.get("podSelector") or {}, labels)
