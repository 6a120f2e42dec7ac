"""Which network policies keep others from the trainer's pods."""

from typing import Any

import pytest

from tasks.doctor.network_policies import policy_problem, selects

TRAIN = {"gleaner-pool": "train", "gleaner-run": "math-1f0c9a2b", "team": "research"}
RANKS = {"podSelector": {"matchLabels": {"gleaner-pool": "train"}}}
OPEN, CUT, NONE = "lets others", "none lets the trainer's pods", "no NetworkPolicy holds"


def policy(*rules: dict[str, Any], selector: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    whole = {"podSelector": selector or {}, "policyTypes": ["Ingress"], "ingress": list(rules), **spec}
    return {"metadata": {"name": "p"}, "spec": whole}


GOOD = policy({"from": [RANKS]}, selector={"matchLabels": {"gleaner-pool": "train"}})


@pytest.mark.parametrize(
    ("policies", "lack"),
    [
        ([], NONE),
        ([GOOD], None),
        ([policy({"from": [RANKS]}), policy()], None),
        ([policy({"from": [RANKS], "ports": [{"port": 1, "endPort": 65535}]})], None),
        ([policy({"from": [RANKS], "ports": [{"protocol": "TCP"}]})], None),
        ([policy({"from": [RANKS], "ports": [{"port": 29400}]})], CUT),
        ([policy({"from": [RANKS], "ports": [{"protocol": "UDP", "port": 1, "endPort": 65535}]})], CUT),
        ([policy({"from": [RANKS], "ports": [{"port": "rendezvous"}]})], CUT),
        ([policy()], CUT),
        ([policy({"from": [RANKS]}, policyTypes=["Egress"])], NONE),
        ([policy({"from": [RANKS]}, selector={"matchLabels": {"gleaner-pool": "rollout"}})], NONE),
        ([policy({"from": [RANKS]}, selector={"matchLabels": {"gleaner-run": "another"}})], NONE),
        ([GOOD, policy({})], OPEN),
        ([GOOD, policy({"from": []})], OPEN),
        ([GOOD, policy({"from": [{"podSelector": {}}]})], OPEN),
        ([GOOD, policy({"from": [{"podSelector": {"matchLabels": {"team": "research"}}}]})], OPEN),
        ([GOOD, policy({"from": [{"namespaceSelector": {}}]})], OPEN),
        ([GOOD, policy({"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]})], OPEN),
        ([GOOD, policy({"from": [{"ipBlock": {"cidr": "::/0"}}]})], OPEN),
        ([GOOD, policy({"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.0/9"]}}]})], OPEN),
        ([GOOD, policy({"from": [{"ipBlock": {"cidr": f"{half}/1"}} for half in ("0.0.0.0", "128.0.0.0")]})], OPEN),
        ([GOOD, policy({"from": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]})], None),
        ([GOOD, policy({}, selector={"matchLabels": {"app": "another"}})], None),
        ([policy({"from": [{"podSelector": {"matchLabels": {**TRAIN}}}]})], None),
    ],
)
def test_what_lets_others_in_or_keeps_ranks_apart_is_wrong(policies, lack):
    found = policy_problem(policies, TRAIN)
    assert found is None if lack is None else lack in (found or "")


@pytest.mark.parametrize(
    ("expression", "selected"),
    [
        ({"operator": "In", "values": ["train", "rollout"]}, True),
        ({"operator": "In", "values": ["control"]}, False),
        ({"operator": "NotIn", "values": ["control"]}, True),
        ({"operator": "Exists"}, True),
        ({"operator": "DoesNotExist"}, False),
    ],
)
def test_expressions_select_as_those_of_kubernetes(expression, selected):
    assert selects({"matchExpressions": [{"key": "gleaner-pool", **expression}]}, TRAIN) == selected
    assert selects({}, {})
