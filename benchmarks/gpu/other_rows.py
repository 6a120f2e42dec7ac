"""Table rows of the parts of benchmarks.gpu that measure one thing each. Pure functions of JSON values."""

from collections.abc import Iterator, Mapping
from typing import Any

Figures = Mapping[str, Any]


def other_rows(figures: Mapping[str, Figures]) -> Iterator[dict[str, Any]]:
    """The rows of identity, kernels, start, head, handover, frontend and iteration, as far as they were measured."""
    yield from _identity_rows(figures.get("identity", {}))
    yield from _kernel_rows(figures)
    for name in ("cold", "warm"):
        for phase, seconds in figures.get("start", {}).get(name, {}).items():
            yield {"measure": f"vLLM, {name}, {phase.removesuffix('_s')}, s", "value": seconds}
    yield from _head_rows(figures.get("head", {}))
    for name, arm in figures.get("handover", {}).get("arms", {}).items():
        for way in ("write", "read"):
            value = arm.get("skipped") or arm[f"{way}_bytes_per_s"] / 1e9
            yield {"measure": f"weights through {name}, {way}, GB/s", "value": value}
    yield from _frontend_rows(figures.get("frontend", {}))
    whole = figures.get("iteration", {})
    for name, seconds in whole.get("seconds", {}).items():
        yield {"measure": f"iteration on {whole['engine']}, {name}, s", "value": seconds}
    for name, value in whole.get("metrics", {}).items():
        yield {"measure": f"iteration, {name}", "value": value}


def invariance_price(figures: Mapping[str, Figures]) -> dict[str, float]:
    """By shape: how many times as fast vLLM decodes without its batch-invariant kernels, where both were measured."""
    plain, invariant = _rates(figures, "plain"), _rates(figures, "invariant")
    return {shape: plain[shape] / invariant[shape] for shape in plain if shape in invariant}


def _rates(figures: Mapping[str, Figures], kind: str) -> dict[str, float]:
    """Tokens per second by shape of the parts `kind`_`shape`."""
    parts = {part.removeprefix(f"{kind}_"): those for part, those in figures.items() if part.startswith(f"{kind}_")}
    return {shape: those["tokens_per_s"][kind] for shape, those in parts.items() if kind in those["tokens_per_s"]}


def _identity_rows(identity: Figures) -> Iterator[dict[str, Any]]:
    for arm in identity.get("arms", []):
        name = f"{arm['kind']}, heads of {arm['head_width']}, batch {arm['batch']}"
        yield {"measure": f"{name}, resumed responses identical", "value": arm["resumed_identical"]}
        yield {"measure": f"{name}, identical to the smallest batch", "value": arm["as_in_smallest_batch"]}


def _kernel_rows(figures: Mapping[str, Figures]) -> Iterator[dict[str, Any]]:
    for kind, kernels in (("plain", "usual"), ("invariant", "batch-invariant")):
        for shape, rate in _rates(figures, kind).items():
            yield {"measure": f"vLLM {shape}, {kernels} kernels, tokens/s", "value": rate}
    for shape, price in invariance_price(figures).items():
        yield {"measure": f"vLLM {shape}, usual kernels over batch-invariant ones", "value": price}


def _head_rows(head: Figures) -> Iterator[dict[str, Any]]:
    for arm in head.get("arms", []):
        for chunk, microseconds in arm["us_per_token"].items():
            name = f"head of {arm['hidden']}, 2^{int(chunk).bit_length() - 1} logits a chunk, us per token"
            marks = {"fastest": "fastest"} if int(chunk) == arm["fastest"] else {}
            yield {"measure": name, "value": microseconds, **marks}
    if head.get("chosen"):
        yield {"measure": "head, logits a chunk that the trainer takes", "value": head["chosen"]}


def _frontend_rows(frontend: Figures) -> Iterator[dict[str, Any]]:
    for arm in frontend.get("arms", []):
        name = f"front end, {frontend['responses']} in flight, tokens every {arm['interval']}"
        yield {"measure": f"{name}, tokens/s", "value": arm["tokens_per_s"]}
        yield {"measure": f"{name}, its processor time, us per token", "value": arm["cpu_us_per_token"]}
        yield {"measure": f"{name}, share of a core", "value": arm["busy"]}
        yield {"measure": f"{name}, responses with the same tokens", "value": arm["same_tokens"]}
