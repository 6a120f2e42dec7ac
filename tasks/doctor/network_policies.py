"""Examines the network policies around the pods of a trainer with several nodes: only the trainer's pods may connect.

Torch's launcher listens on every interface without a password, and unpickles received bytes. Only policies of
networking.k8s.io/v1 are examined.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from resources.labels import POOL_LABEL, RUN_LABEL, url_label
from storage.records.fitness import Finding
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


def policy_finding(cluster: Cluster, place: ClusterTarget, demand: ClusterDemand) -> Finding:
    """A finding that is right if the trainer's pods reach each other and no further pod reaches the trainer's pods."""
    found = cluster.get(f"/apis/networking.k8s.io/v1/namespaces/{place.namespace}/networkpolicies") or {}
    train = trainer_labels(demand)
    lack = policy_problem(found.get("items") or [], train)
    return Finding(NAME, "the trainer's pods alone reach each other", lack)


def trainer_labels(demand: ClusterDemand) -> dict[str, str]:
    """The constant labels of the trainer's pods."""
    run = {} if demand.store_url is None else {RUN_LABEL: url_label(demand.store_url)}
    labels = {**demand.pools.labels, **demand.pools.train.labels}
    return {**run, POOL_LABEL: "train", **{name: value or "" for name, value in labels.items()}}


def policy_problem(policies: Iterable[Mapping[str, Any]], train: Mapping[str, str]) -> str | None:
    """The problem of a namespace's policies for a trainer with pod labels `train`; None: no problem."""
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
    """True if a label selector of Kubernetes selects an object with `labels`; an empty selector selects all objects."""
    wanted = selector.get("matchLabels") or {}
    return all(labels.get(name) == value for name, value in wanted.items()) and all(
        _OPERATORS[each["operator"]](labels.get(each["key"]), each.get("values") or [])
        for each in selector.get("matchExpressions") or []
    )


def _peers(policy: Mapping[str, Any], ports: tuple[int, int] | None = None) -> Iterator[Mapping[str, Any] | None]:
    """Peers that may connect; a peer of None: every pod. ports: only peers of rules for all TCP ports in the range."""
    for rule in policy["spec"].get("ingress") or []:
        if ports is None or not rule.get("ports") or any(_covers(each, *ports) for each in rule["ports"]):
            yield from rule.get("from") or [None]


def _covers(port: Mapping[str, Any], low: int, high: int) -> bool:
    first = port.get("port")
    if port.get("protocol", "TCP") != "TCP" or isinstance(first, str):
        return False
    return first is None or (first <= low and port.get("endPort", first) >= high)


def _lets_in(peer: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """True if a pod of the namespace with `labels` may connect; rules about further namespaces are not judged."""
    if peer is None:
        return True
    if "ipBlock" in peer:
        # An address says nothing of who has it.
        return True
    if peer.get("namespaceSelector"):
        return False
    return selects(peer.get("podSelector") or {}, labels)
