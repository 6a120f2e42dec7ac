"""The table and the targets of benchmarks.gpu, from the figures of its parts. Pure functions of JSON values."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.other_rows import Figures, other_rows
from benchmarks.reporting import Target


def rows(figures: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """One table row per measurement; `figures` holds the figures of every measured part by its name."""
    found = [*_noise_rows(figures.get("noise", {})), *_trainer_rows(figures.get("trainer", {})), *other_rows(figures)]
    engines = figures.get("engines", {})
    rates = engines.get("tokens_per_s", {})
    bare = engines.get("tokens_per_s", {}).get("vllm_bare")
    for name, rate in rates.items():
        row: dict[str, Any] = {"measure": f"engine {name}, tokens/s", "value": rate}
        found.append(row if bare is None else {**row, "of bare vLLM": rate / bare})
    for name, why in engines.get("skipped", {}).items():
        found.append({"measure": f"engine {name}", "value": f"skipped: {why}"})
    if "session_seconds" in engines:
        found.append({"measure": "seconds of a session besides its tokens", "value": engines["session_seconds"]})
    share = decode_share(figures)
    if share is not None:
        found.append({"measure": "keyed noise, share of vLLM's decode step", "value": share})
    found += [{"measure": f"{name} tax %", "value": tax} for name, tax in taxes(figures).items()]
    warnings = [(part, message) for part, those in figures.items() for message in those.get("warnings", [])]
    return found + [{"measure": f"{part} warns", "value": message} for part, message in warnings]


def taxes(figures: Mapping[str, Figures]) -> dict[str, float]:
    """Our overheads in per cent of time, as far as both sides were measured.

    "keyed noise": of a batch's sampling over exponential noise without keys, for the largest batch. "keyed sampling":
    of the whole decode loop on vLLM. "journalling": of a session over that loop.
    """
    found = {}
    if "noise" in figures:
        step_us = figures["noise"]["batches"][-1]["step_us"]
        found["keyed noise"] = 100 * (step_us["keyed"] / step_us["exponential"] - 1)
    engines = figures.get("engines", {})
    rates = engines.get("tokens_per_s", {})
    if {"vllm_keyed", "vllm_unkeyed"} <= rates.keys():
        found["keyed sampling"] = 100 * (rates["vllm_unkeyed"] / rates["vllm_keyed"] - 1)
    if "journalling_tax_percent" in engines:
        found["journalling"] = engines["journalling_tax_percent"]
    return found


def decode_share(figures: Mapping[str, Figures]) -> float | None:
    """The share of vLLM's decode step that keyed sampling takes, if both were measured at the same batch size."""
    engines = figures.get("engines", {})
    rate = engines.get("tokens_per_s", {}).get("vllm_keyed")
    for batch in figures.get("noise", {}).get("batches", []):
        if rate is not None and batch["batch"] == engines["responses"]:
            return float(batch["step_us"]["keyed"] * 1e-6 * rate / batch["batch"])
    return None


def targets(figures: Mapping[str, Figures]) -> list[Target]:
    """The claims about a GPU whose figures were measured."""
    found = []
    if "noise" in figures:
        batches = figures["noise"]["batches"]
        equal = min(batch["tokens_equal_to_cpu"] for batch in batches)
        difference = max(batch["logprob_difference_max"] for batch in batches)
        found.append(Target("keyed_tokens_equal_to_cpu", equal, ">= 0.99"))
        found.append(Target("keyed_logprob_difference_to_cpu", difference, "<= 0.0001"))
    bounds = {"keyed noise": "<= 0", "keyed sampling": "< 3", "journalling": "< 1"}
    for name, tax in taxes(figures).items():
        found.append(Target(f"{name.replace(' ', '_')}_tax_percent", tax, bounds[name]))
    resumed = [arm["resumed_identical"] for arm in figures.get("identity", {}).get("arms", []) if arm["kind"] == "vllm"]
    if resumed:
        found.append(Target("resumed_responses_identical_on_vllm", min(resumed), ">= 1"))
    rates = figures.get("engines", {}).get("tokens_per_s", {})
    if {"vllm_bare", "vllm_unkeyed"} <= rates.keys():
        found.append(Target("engine_over_bare_vllm", rates["vllm_unkeyed"] / rates["vllm_bare"], ">= 0.95"))
    return found


def _noise_rows(noise: Figures) -> Iterator[dict[str, Any]]:
    for batch in noise.get("batches", []):
        for name in batch["step_us"]:
            row = {"measure": f"noise {name}, batch {batch['batch']}, us", "value": batch["step_us"][name]}
            yield {**row, "single call": batch["call_us"][name]}
        name = f"keyed noise, share of itself and products, batch {batch['batch']}"
        yield {"measure": name, "value": batch["keyed_share"]}
        if "fused" in batch:
            yield {"measure": f"keyed noise fused, batch {batch['batch']}", "value": batch["fused"]}


def _trainer_rows(trainer: Figures) -> Iterator[dict[str, Any]]:
    for arm in trainer.get("arms", []):
        name = f"trainer{', gradient checkpointing' if arm['gradient_checkpointing'] else ''}"
        name += ", Liger" if arm.get("liger") else ""
        if "out_of_memory" in arm:
            yield {"measure": name, "value": f"out of memory: {arm['out_of_memory']}"}
            continue
        yield {"measure": f"{name}, tokens/s", "value": arm["tokens_per_s"]}
        if arm["peak_memory_bytes"] is not None:
            yield {"measure": f"{name}, peak GiB", "value": arm["peak_memory_bytes"] / (1 << 30)}
        yield {"measure": f"{name}, 6NT TFLOP/s", "value": arm["model_flops_per_s"] / 1e12}
        if arm["mfu"] is not None:
            yield {"measure": f"{name}, share of the GPU's peak", "value": arm["mfu"]}
