"""Other runs in a configuration: a version to begin with (`run.from`), and what is known of prompts (`data.from`).

The name of these fields is a keyword of Python: the attribute is `from_`, and `json_values` has the document's name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from storage.stores.connect import check_url, overlap

_VERSION = re.compile(r"(.+)@([0-9]{1,8})", re.DOTALL)
_ITERATIONS = re.compile(r"(.+?)(?:@([0-9]*:[0-9]*))?", re.DOTALL)
_ALLOWED = "<url>@<version>, such as s3://bucket/run@12"


@dataclass(frozen=True)
class VersionOf:
    """A weight version of a run."""

    url: str
    version: int


def version_of(text: str) -> VersionOf:
    """The version that `run.from` names; raises ValueError, whose message begins with the field."""
    found = _VERSION.fullmatch(text)
    if found is None:
        raise ValueError(f"from: value {text!r}; allowed: {_ALLOWED}")
    try:
        check_url(found[1])
    except ValueError as error:
        raise ValueError(f"from: {str(error).removeprefix('storage URL: ')}; allowed: {_ALLOWED}") from None
    return VersionOf(found[1], int(found[2]))


@dataclass(frozen=True)
class IterationsOf:
    """Iterations of a run, as `parse_range` reads them: "a:b", "a:", ":b" or ":"."""

    url: str
    iterations: str


def iterations_of(text: str, field: str = "from") -> IterationsOf:
    """The iterations that a field names, by default all; raises ValueError, whose message begins with the field."""
    found = _ITERATIONS.fullmatch(text)
    if found is None:
        raise ValueError(f"{field}: value ''; allowed: <url>@<a>:<b>")
    try:
        check_url(found[1])
    except ValueError as error:
        allowed = "<url> or <url>@<a>:<b>, such as s3://bucket/run@20:40"
        raise ValueError(f"{field}: {str(error).removeprefix('storage URL: ')}; allowed: {allowed}") from None
    return IterationsOf(found[1], found[2] or ":")


def json_values(section: Any) -> dict[str, Any]:
    """A section, or the whole configuration, as JSON values under the names of a document."""
    named = asdict(section, dict_factory=lambda items: {name.removesuffix("_"): value for name, value in items})
    resolved: dict[str, Any] = json.loads(json.dumps(named))
    return resolved


def with_policy(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document in which the policy that is left out beside `run.from` is the other run's."""
    run = document.get("run")
    named = run.get("from") if isinstance(run, Mapping) else None
    if isinstance(named, str) and "policy" not in document:
        return {**document, "policy": {"path": named}}
    return document


def _replays_that_clash(config: Any) -> Iterator[str]:
    replay, algorithm, run = config.data.replay, config.algorithm, config.run
    if replay is None:
        return
    for text in replay.runs:
        if overlap(run.url, iterations_of(text).url):
            yield f"data.replay.runs: value {text!r}; allowed: other runs than run.url, and none above or below"
    wanted = replay.groups(run.num_prompts_per_step)
    if not 0 < wanted < run.num_prompts_per_step:
        yield (
            f"data.replay.share: value {replay.share}, {wanted} groups of run.num_prompts_per_step "
            f"({run.num_prompts_per_step}); allowed: at least one, and not all"
        )
    if algorithm.learns_examples:
        kind = algorithm.kind
        yield f"data.replay: given; allowed with algorithm.kind {kind!r}: null, because it corrects for no sampler"
    elif algorithm.old_logprobs == "trainer" and algorithm.importance_sampling == "none":
        yield (
            "data.replay: given; allowed with algorithm.importance_sampling 'none': null, because the loss does not "
            "correct for another sampler"
        )
    elif algorithm.old_logprobs == "sampler" and config.teacher is not None and config.teacher.top_k is None:
        yield (
            "algorithm.old_logprobs: value 'sampler'; allowed with data.replay and a teacher without top_k: 'trainer', "
            "because log(policy / teacher) of a stored token needs the policy's log-prob"
        )
    if config.turns is not None:
        yield "data.replay: given; allowed with turns: null"
    if algorithm.filter_groups:
        yield "data.replay: given; allowed with algorithm.filter_groups: null, because stored groups may be filtered"


def origins_that_clash(config: Any) -> Iterator[str]:
    """A line about each field that cannot be beside another run, with what is allowed. config: the RunConfig."""
    run = config.run
    if config.data.from_ is not None and overlap(run.url, iterations_of(config.data.from_).url):
        yield f"data.from: value {config.data.from_!r}; allowed: another run than run.url, and none above or below"
    yield from _replays_that_clash(config)
    held_out = None if config.evaluation is None else config.evaluation.data
    if held_out is not None and held_out.from_ is not None:
        yield "evaluation.data.from: given; allowed: null, because every held-out prompt is evaluated"
    if held_out is not None and held_out.replay is not None:
        yield "evaluation.data.replay: given; allowed: null, because nothing is trained"
    if run.from_ is None:
        if run.from_optimizer:
            yield "run.from_optimizer: value true; allowed: false, or true with run.from"
        return
    if overlap(run.url, version_of(run.from_).url):
        yield (
            f"run.from: value {run.from_!r}; allowed: a version of another run than run.url ({run.url}), and of none "
            "above or below"
        )
    if config.policy.path == run.from_ and config.policy.revision is not None:
        yield f"policy.revision: value {config.policy.revision!r}; allowed with the model of another run: null"
    if run.from_optimizer and config.lora is not None:
        yield (
            "run.from_optimizer: value true; allowed with lora: false, because new adapters are added to the merged "
            "weights of the version"
        )
