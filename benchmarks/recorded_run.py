"""What a finished run's directory says: what was learned, to the last bit, and which objects and fields are there.

Facts are read by content, so ids of processes, times and nonces are not among them.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from storage.journal.compaction import read_batches, read_responses
from storage.records import layout
from storage.records.prompt_table import read_prompts
from storage.records.records import GradedResponse
from storage.records.run import read_plan, reports
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from storage.weights.tensor_sets import read_manifest

Facts = dict[str, Any]
# Metrics that depend on when something happened.
_TIMED = ("timing_s/", "cost/", "requests/", "plan/", "balance/")
_COUNTED = ("requests/crew_puts", "requests/crew_gets", "requests/train_puts", "requests/train_gets")
_NAMED_BY_PROCESS = re.compile(r"\d{5,}-[0-9a-f]{16}|[0-9a-f]{16,}")


@dataclass(frozen=True)
class Recorded:
    """A run that has ended.

    Attributes:
        facts: by aspect, such as "tokens", and by place, such as "0/17" for response 17 of iteration 0.
        objects: kinds of objects, by the pattern of their keys.
        fields: fields of records and columns of tables, after the kind of their objects.
        requests: what members and trainers asked of the store.
        stored_bytes: bytes of all objects at the end.
    """

    facts: Mapping[str, Facts]
    objects: frozenset[str]
    fields: frozenset[str]
    requests: float
    stored_bytes: int


def read_recorded(url: str, iterations: int, fleet: str | None = None) -> Recorded:
    """Read a run, and the fleet that trained it; raises LookupError unless `iterations` iterations are committed."""
    store = connect(url)
    committed = reports(store)
    if len(committed) != iterations:
        raise LookupError(f"{url}: {len(committed)} iterations are committed; expected {iterations}")
    facts: dict[str, Facts] = {"weights": {}, "optimizer": {}}
    for report in committed:
        for aspect, found in _iteration(store, report.iteration).items():
            facts.setdefault(aspect, {}).update(found)
        of_version = {
            "weights": layout.weights(report.weight_version),
            "optimizer": layout.checkpoint(report.weight_version),
        }
        for aspect, prefix in of_version.items():
            tensors = read_manifest(store, prefix).tensors
            facts[aspect] |= {
                f"{prefix}{name}": (each.dtype, each.shape, each.digest) for name, each in tensors.items()
            }
        learned = {name: value for name, value in report.metrics.items() if not name.startswith(_TIMED)}
        facts.setdefault("metrics", {}).update({f"{report.iteration}/{name}": v for name, v in learned.items()})
    objects, fields, stored_bytes = set[str](), set[str](), 0
    for place, each in (("", store), *((("fleet/", connect(fleet)),) if fleet else ())):
        for key in each.list(""):
            body = each.get(key)
            stored_bytes += len(body)
            kind = place + _pattern(key)
            objects.add(kind)
            fields |= {f"{kind}: {field}" for field in _fields_of(key, body)}
    requests = sum(report.metrics[name] for report in committed for name in _COUNTED)
    return Recorded(facts, frozenset(objects), frozenset(fields), requests, stored_bytes)


def _iteration(store: ObjectStore, iteration: int) -> dict[str, Facts]:
    plan = read_plan(store, iteration)
    groups = enumerate(read_prompts(store, plan))
    facts: dict[str, Facts] = {
        "prompts": {f"{iteration}/{group}": (row.prompt_id, row.token_ids, row.columns) for group, row in groups},
        "tokens": {},
        "log-probs": {},
        "rewards": {},
        "batches": {},
    }
    for row in read_responses(store, iteration):
        place = f"{iteration}/{row.response}"
        facts["tokens"][place] = (row.token_ids.tobytes(), row.origins, row.finish, row.prompt_id, row.weight_version)
        facts["log-probs"][place] = row.logprobs.tobytes()
        facts["rewards"][place] = (row.reward, row.rewards)
    for batch in read_batches(store, iteration):
        used = [tuple(map(_without_lineage, part)) for part in (batch.responses, batch.filtered)]
        facts["batches"][f"{iteration}/{batch.number}"] = (used, batch.reward_errors)
    return facts


def _without_lineage(graded: GradedResponse) -> tuple[Any, ...]:
    ends = (graded.response, graded.length, graded.policy_length, graded.finish_reason)
    return (*ends, graded.reward, graded.rewards)


def differences(before: Recorded, after: Recorded) -> dict[str, list[str]]:
    """By aspect, the places where two runs differ; a metric that only `after` has is no difference, but a new field."""
    found = {}
    for aspect, facts in before.facts.items():
        others = after.facts.get(aspect, {})
        places = facts.keys() if aspect == "metrics" else facts.keys() | others.keys()
        found[aspect] = sorted(place for place in places if not _same(facts.get(place), others.get(place)))
    return found


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal; repr has every digit of a float, and makes NaN equal to itself."""
    return repr(one) == repr(other)


def _pattern(key: str) -> str:
    """The key without numbers and names of processes, executions and contents."""
    return re.sub(r"\d+", "#", _NAMED_BY_PROCESS.sub("<id>", key))


def _fields_of(key: str, body: bytes) -> Iterator[str]:
    """The fields of a JSON object or of its `body`, or the columns of an Arrow object."""
    if key.endswith(".json"):
        yield from _paths(json.loads(body))
    elif key.endswith(".arrow"):
        with pa.ipc.open_stream(body) as stream:
            yield from stream.schema.names


def _paths(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for name, held in value.items():
                yield (field := _pattern(name))
                yield from (f"{field}.{path}" for path in _paths(held))
        case list():
            for held in value:
                yield from (f"[].{path}" for path in _paths(held))
