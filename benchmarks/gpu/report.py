"""The table and the targets of benchmarks.gpu, from the figures of its parts. Pure functions of JSON values."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.other_rows import Figures, other_rows, over_rate, rates_of
from benchmarks.reporting import Target


def rows(figures: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """One table row per measurement; `figures` holds the figures of every measured part by its name."""
    found = [*_trainer_rows(figures.get("trainer", {})), *_noise_rows(figures.get("noise", {})), *other_rows(figures)]
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
    taxed = figures.get("taxes", {})
    for rates in rates_of(taxed).values():
        if {"ours", "unkeyed"} <= rates.keys():
            found["keyed sampling"] = 100 * (rates["unkeyed"] / rates["ours"] - 1)
    if "journalling_tax_percent" in taxed:
        found["journalling"] = taxed["journalling_tax_percent"]
    return found


def decode_share(figures: Mapping[str, Figures]) -> float | None:
    """The share of vLLM's decode step that keyed sampling takes, if both were measured at the same batch size."""
    for part in ("engines", "taxes"):
        rates = rates_of(figures.get(part, {}))
        for batch in figures.get("noise", {}).get("batches", []):
            for (_, responses), those in rates.items():
                if "ours" in those and responses == batch["batch"]:
                    return float(batch["step_us"]["keyed"] * 1e-6 * those["ours"] / responses)
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
    for engine, over, name, bound in (
        ("ours", "bare", "engine_over_bare_vllm", ">= 0.97"),
        ("torch", "ours", "torch_engine_over_vllm", ">= 0.5"),
    ):
        ratios = over_rate(figures.get("engines", {}), engine, over)
        found += [Target(f"{name}_{model}_{batch}", value, bound) for (model, batch), value in ratios.items()]
    for share, over_theirs in over_trl(figures.get("trainer", {})).items():
        found.append(
            Target(f"trainer_over_trl_padded_{share:g}", over_theirs["speed"], ">= 2.2" if share else ">= 1.5")
        )
        if "memory" in over_theirs and not share:
            found.append(Target("trainer_memory_over_trl", over_theirs["memory"], "<= 0.8"))
    starts = figures.get("start", {})
    found += [
        Target(f"vllm_start_{name}_s", starts[name]["start_s"], bound)
        for name, bound in (("warm", "<= 25"), ("cold", "<= 45"))
        if name in starts
    ]
    busy = figures.get("iteration", {}).get("gpu_busy_share")
    return found if busy is None else [*found, Target("iteration_gpu_busy_share", busy, ">= 0.8")]


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
        name = f"trainer {_arm_name(arm)}, padded share {arm['padded_share']:g}"
        if "step_s" not in arm:
            yield {"measure": name, "value": arm.get("skipped") or f"out of memory: {arm['out_of_memory']}"}
            continue
        row: dict[str, Any] = {"measure": f"{name}, tokens/s", "value": arm["tokens_per_s"]}
        if arm["peak_memory_bytes"] is not None:
            row |= {"peak GiB": arm["peak_memory_bytes"] / (1 << 30), "share of the GPU's peak": arm["mfu"]}
        yield row | arm.get("waits", {})
    for share, over in over_trl(trainer).items():
        yield {"measure": f"trainer over TRL's fastest, padded share {share:g}", "value": over["speed"], **over}


def _arm_name(arm: Figures) -> str:
    packing = ("packed" if arm["packed"] else "padded") if arm["trainer"] == "ours" else arm.get("trl", "")
    marks = {
        "shared prompts": arm.get("shared_tokens"),
        "Liger": arm["liger"],
        "gradient checkpointing": arm["gradient_checkpointing"],
    }
    return ", ".join([f"{arm['trainer']} {packing}".strip(), *(name for name, on in marks.items() if on)])


def over_trl(trainer: Figures) -> dict[float, dict[str, float]]:
    """By padded share: tokens per second and peak memory of our fastest arm over those of TRL's fastest."""
    found = {}
    measured = [arm for arm in trainer.get("arms", []) if "step_s" in arm]
    for share in dict.fromkeys(arm["padded_share"] for arm in measured):
        ours, theirs = (
            min(
                (arm for arm in measured if arm["trainer"] == name and arm["padded_share"] == share),
                key=lambda arm: float(arm["step_s"]),
                default=None,
            )
            for name in ("ours", "trl")
        )
        if ours is None or theirs is None:
            continue
        found[share] = {"speed": theirs["step_s"] / ours["step_s"]}
        if ours["peak_memory_bytes"] and theirs["peak_memory_bytes"]:
            found[share]["memory"] = ours["peak_memory_bytes"] / theirs["peak_memory_bytes"]
    return found
