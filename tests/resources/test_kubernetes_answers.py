"""What an API server answered to pods, against what a pool's fields may be.

tests/data/kubernetes_answers.jsonl: pods in which one field varies, sent to kube-apiserver 1.34.1 as dry runs with
strict field validation; `code` and the head of `message` are its answers. The rules that the property tests draw
around are the regular expressions and limits that the server itself named in its messages.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from resources.pools import PoolConfig

ANSWERS = Path(__file__).parents[1] / "data" / "kubernetes_answers.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in ANSWERS.read_text(encoding="utf-8").splitlines()]
CREATED, REFUSED, DEPENDS_ON_CLUSTER = 201, {400, 422}, 403
FIELDS = {
    "metadata.labels": "labels",
    "spec.tolerations": "tolerations",
    "spec.nodeSelector": "node_selector",
    "spec.terminationGracePeriodSeconds": "grace_s",
    "container.env": "env",
    "container.image": "image",
}
GPU = "nvidia.com/gpu"
# A pool asks for more than the server does: time for a last flush, and an image of which a run can be repeated.
STRICTER = {"grace_s", "image"}


def pool_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """The pool whose pods are those of a row; None if no pool has such pods."""
    field, value = row["field"], row["value"]
    if field == "container.resources":
        # A pool requests what it is limited to, and Flyte names the GPUs.
        asked = value["requests"]
        if asked != value["limits"] or not asked.keys() <= {"cpu", "memory", GPU} or None in asked.values():
            return None
        return {
            "gpus" if name == GPU else name: json.loads(text) if name == GPU else text for name, text in asked.items()
        }
    return {FIELDS[field]: value}


def refusal_of(pool: dict[str, Any]) -> str | None:
    """The message with which a pool is refused; None if it is accepted."""
    try:
        TypeAdapter(PoolConfig).validate_json(json.dumps(pool))
    except ValidationError as error:
        return str(error)
    return None


JUDGED = [row for row in ROWS if pool_of(row) is not None and row["code"] != DEPENDS_ON_CLUSTER]


def test_the_table_says_something_about_every_field():
    judged = Counter((next(iter(pool_of(row))), row["code"] == CREATED) for row in JUDGED)
    fields = {*FIELDS.values(), "cpu", "memory", "gpus"}
    assert {field for field, accepted in judged if accepted} == fields
    assert {field for field, accepted in judged if not accepted} == fields
    assert len(JUDGED) >= 90


@pytest.mark.parametrize("row", JUDGED, ids=lambda row: f"{row['field']}={json.dumps(row['value']):.60}")
def test_a_pool_is_refused_exactly_when_the_server_refuses_its_pods(row):
    pool = pool_of(row)
    refusal = refusal_of(pool)
    if row["code"] in REFUSED:
        assert refusal is not None
        assert next(iter(pool)) in refusal
    elif not STRICTER & pool.keys():
        assert refusal is None


# Around the borders of the table: texts of the characters that its rules are about.
EDGES = st.text(st.sampled_from("aZ9-._/ =:\u00fc\n"), max_size=8)
LONG = st.builds(lambda letter, size, end: letter * size + end, st.sampled_from("aA."), st.integers(55, 70), EDGES)
TEXTS = EDGES | LONG
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
SERVERS_QUANTITY = re.compile(r"([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)")


@given(TEXTS)
def test_label_values_everywhere(text):
    allowed = LABEL_VALUE.fullmatch(text) is not None and len(text) <= 63
    for pool in (
        {"labels": {"team": text}},
        {"node_selector": {"zone": text}},
        {"tolerations": [{"key": "a", "value": text}]},
    ):
        assert (refusal_of(pool) is None) == allowed


@given(TEXTS, TEXTS)
def test_names_of_labels_everywhere(prefix, name):
    is_name = name != "" and LABEL_VALUE.fullmatch(name) is not None and len(name) <= 63
    is_prefix = SUBDOMAIN.fullmatch(prefix) is not None and len(prefix) <= 253
    for label, allowed in ((name, is_name or None), (f"{prefix}/{name}", is_name and is_prefix)):
        if allowed is None and "/" in label:
            continue
        for pool in ({"labels": {label: "x"}}, {"node_selector": {label: "x"}}):
            assert (refusal_of(pool) is None) == bool(allowed)


@given(TEXTS | st.integers(245, 260).map("a".__mul__))
def test_names_of_objects(text):
    allowed = text == "" or (SUBDOMAIN.fullmatch(text) is not None and len(text) <= 253)
    assert (refusal_of({"pod_template": text}) is None) == allowed


@given(TEXTS)
def test_names_of_variables(text):
    allowed = text != "" and text.isascii() and text.isprintable() and "=" not in text
    assert (refusal_of({"env": [{"name": text, "value": "x"}]}) is None) == allowed


@given(st.text(st.sampled_from("019.+-eEikKmMGTP "), max_size=7))
def test_quantities(text):
    accepted = refusal_of({"memory": text}) is None
    # The server's expression is wider than its parser: it only bounds what may be accepted.
    assert not accepted or SERVERS_QUANTITY.fullmatch(text.strip())
    plain = re.fullmatch(r"[0-9]+(\.[0-9]+)?([KMGTP]i|[kmMGTP])?", text.strip())
    assert accepted or not plain


@given(
    st.sampled_from([None, "", "a", "a/b", "a/b/c"]),
    st.sampled_from([None, "", "Equal", "Exists", "exists", "In"]),
    st.sampled_from([None, "", "x", "x y"]),
    st.sampled_from([None, "", "NoSchedule", "PreferNoSchedule", "NoExecute", "noexecute"]),
    st.sampled_from([None, -1, 0, 30]),
)
def test_tolerations(key, operator, value, effect, seconds):
    given_fields = {"key": key, "operator": operator, "value": value, "effect": effect, "tolerationSeconds": seconds}
    allowed = (
        key != "a/b/c"
        and operator in (None, "", "Equal", "Exists")
        and (bool(key) or operator == "Exists")
        and value != "x y"
        and not (operator == "Exists" and value)
        and effect != "noexecute"
        and (seconds is None or effect == "NoExecute")
    )
    for toleration in (given_fields, {name: each for name, each in given_fields.items() if each is not None}):
        assert (refusal_of({"tolerations": [toleration]}) is None) == allowed


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"labels": {"kueue.x-k8s.io/queue-name": "team/gpu"}}, "queue-name: value 'team/gpu'; allowed"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "x" * 64}}, "queue-name: value"),
        ({"labels": {"gleaner-run": "mine"}}, "every pod of a run gets this label"),
        ({"secrets": [{"group": "g", "key": "k"}]}, "secrets.0.env_var: missing"),
        ({"secrets": [{"group": "g", "key": "k", "env_var": "A=B"}]}, "secrets.0.env_var: value 'A=B'"),
        ({"env": [{"name": "A", "valueFrom": {}}]}, "env.0.valueFrom: value []; allowed: exactly one source"),
        ({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}, "fieldRef: unknown field"),
    ],
)
def test_what_a_pool_refuses_beyond_the_table(pool, message):
    assert message in refusal_of(pool)
