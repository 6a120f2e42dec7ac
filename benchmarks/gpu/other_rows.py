"""Table rows of the parts of benchmarks.gpu that measure one thing each. Pure functions of JSON values."""

from collections.abc import Iterator, Mapping
from typing import Any

Figures = Mapping[str, Any]


def other_rows(figures: Mapping[str, Figures]) -> Iterator[dict[str, Any]]:
    """The rows of all parts but the trainer's and the noise's, as far as they were measured."""
    yield from _engine_rows(figures.get("engines", {}))
    for row in _engine_rows(figures.get("taxes", {})):
        yield {**row, "measure": f"taxes, {row['measure']}"}
    yield from _identity_rows(figures.get("identity", {}))
    for name in ("cold", "warm"):
        if name in figures.get("start", {}):
            yield from _start_rows(f"vLLM, {name}", figures["start"][name])
    yield from _head_rows(figures.get("head", {}))
    for name, arm in figures.get("handover", {}).get("arms", {}).items():
        yield {"measure": f"a new version of weights, {name}, s", "value": arm.get("skipped") or arm["seconds"]}
    yield from _frontend_rows(figures.get("frontend", {}))
    yield from _iteration_rows(figures.get("iteration", {}))
    yield from _speculation_rows(figures.get("speculation", {}))


def rates_of(part: Figures) -> dict[tuple[str, int], dict[str, float]]:
    """By model and responses: the tokens per second of each engine."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for one in part.get("rates", []):
        found.setdefault((one["model"], one["responses"]), {})[one["engine"]] = one["tokens_per_s"]
    return found


def over_rate(part: Figures, engine: str, over: str) -> dict[tuple[str, int], float]:
    """By model and responses: how many times as fast an engine is as another one, where both were measured."""
    return {
        place: rates[engine] / rates[over] for place, rates in rates_of(part).items() if {engine, over} <= rates.keys()
    }


def _engine_rows(part: Figures) -> Iterator[dict[str, Any]]:
    for start in part.get("starts", []):
        yield from _start_rows(f"{start['engine']} {start['model']}, beside {part['engines'] - 1} others", start)
    for (model, responses), rates in rates_of(part).items():
        bare = rates.get("bare")
        for engine, rate in rates.items():
            row: dict[str, Any] = {"measure": f"{engine} {model}, {responses} responses, tokens/s", "value": rate}
            yield row if bare is None else {**row, "of bare vLLM": rate / bare}
    for (model, responses), price in over_rate(part, "ours", "invariant").items():
        name = f"vLLM {model}, {responses} responses, usual kernels over batch-invariant ones"
        yield {"measure": name, "value": price}
    for name, why in part.get("skipped", {}).items():
        yield {"measure": f"engine {name}", "value": f"skipped: {why}"}
    if "session_seconds" in part:
        yield {"measure": "seconds of a session besides its tokens", "value": part["session_seconds"]}


def _start_rows(name: str, start: Figures) -> Iterator[dict[str, Any]]:
    for phase in ("start_s", "load_s", "first_token_s"):
        yield {"measure": f"{name}, {phase.removesuffix('_s').replace('_', ' ')}, s", "value": start[phase]}
    for phase, seconds in start["phases"].items():
        yield {"measure": f"{name}, start: {phase}, s", "value": seconds}


def _iteration_rows(whole: Figures) -> Iterator[dict[str, Any]]:
    for name, iteration in whole.get("iterations", {}).items():
        for metric, value in iteration.items():
            yield {"measure": f"iteration on {whole['engine']}, {name}, {metric}", "value": value}
    if whole.get("gpu_busy_share") is not None:
        yield {"measure": "iteration, share of it in which the GPU works", "value": whole["gpu_busy_share"]}


def _identity_rows(identity: Figures) -> Iterator[dict[str, Any]]:
    for arm in identity.get("arms", []):
        name = f"{arm['kind']}, heads of {arm['head_width']}, batch {arm['batch']}"
        yield {"measure": f"{name}, resumed responses identical", "value": arm["resumed_identical"]}
        yield {"measure": f"{name}, identical to the smallest batch", "value": arm["as_in_smallest_batch"]}


def _speculation_rows(part: Figures) -> Iterator[dict[str, Any]]:
    for step in part.get("steps", []):
        name = f"step {step['model']}, {step['responses']} responses, {step['fed']} tokens each, ms"
        yield {"measure": name, "value": step["ms"], "of 1 token": step["over_1"]}
    for rate in part.get("rates", []):
        name = f"{rate['engine']} {rate['model']}, {rate['responses']} responses, {rate['text']} text"
        drafts = "no drafts" if rate["source"] == "none" else f"drafts by {rate['source']}"
        shares = {share: rate[share] for share in ("identical", "accepted") if rate[share] is not None}
        yield {"measure": f"{name}, {drafts}, tokens/s", "value": rate["tokens_per_s"], **shares}
    for name, why in part.get("skipped", {}).items():
        yield {"measure": f"drafts {name}", "value": f"skipped: {why}"}


def _head_rows(head: Figures) -> Iterator[dict[str, Any]]:
    for arm in head.get("arms", []):
        for chunk, microseconds in arm["us_per_token"].items():
            name = f"head of {arm['hidden']}, 2^{int(chunk).bit_length() - 1} logits a chunk, us per token"
            marks = {"fastest": "fastest"} if int(chunk) == arm.get("fastest") else {}
            yield {"measure": name, "value": microseconds, **marks}
        for way, figures in arm.get("ways", {}).items():
            name = f"head of {arm['hidden']}, {way}"
            if "failed" in figures:
                yield {"measure": name, "value": f"failed: {figures['failed']}"}
                continue
            yield {"measure": f"{name}, us per token", "value": figures["us_per_token"]}
            yield {"measure": f"{name}, peak MiB", "value": figures["peak_bytes"] / (1 << 20)}
    if head.get("chosen"):
        yield {"measure": "head, logits a chunk that the trainer takes", "value": head["chosen"]}


def _frontend_rows(frontend: Figures) -> Iterator[dict[str, Any]]:
    for arm in frontend.get("arms", []):
        name = f"front end, {frontend['responses']} in flight, tokens every {arm['interval']}"
        yield {"measure": f"{name}, tokens/s", "value": arm["tokens_per_s"]}
        yield {"measure": f"{name}, its processor time, us per token", "value": arm["cpu_us_per_token"]}
        yield {"measure": f"{name}, share of a core", "value": arm["busy"]}
        yield {"measure": f"{name}, responses with the same tokens", "value": arm["same_tokens"]}
