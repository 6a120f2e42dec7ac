"""Claim: a rollout killed at random moments ends with the same tokens as without kills, at little extra cost.

Three arms take turns on the same plan and the same kills: an undisturbed rollout; Gleaner with kills; and, with kills,
a rollout that keeps only finished responses and begins the others again from the prompt. Workers are processes, and
kills are SIGKILL.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.baselines import finished_kept_process
from benchmarks.crew_processes import Crew, Killed, cold_start_s, kill_schedule, slot_process
from benchmarks.reporting import Target, finish
from examples.warm_start import build_model, build_tokenizer
from storage.clock import SystemClock
from storage.journal.assembly import Assembled, JournalReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.run import read_plan
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import parse
from tasks.preparing.iteration import prepare

SLOTS = 2
GENERATIONS = 4
VOCABULARY = 512
IN_FLIGHT = 8


@dataclass(frozen=True)
class Size:
    prompts: int
    length: int
    kills: int
    rounds: int
    flush_interval_s: float


def make_model(directory: Path) -> None:
    """Write a random tiny Qwen2 whose responses mostly reach the limit, so that every kill strikes unfinished ones."""
    torch.manual_seed(0)
    build_model(VOCABULARY, context_length=1024).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


def make_run(
    folder: Path,
    model: Path,
    *,
    prompts: int,
    length: int,
    slots: int,
    engine: Literal["torch", "vllm"] = "torch",
    **rollout: float,
) -> str:
    """Create a run with one planned iteration, the same in all arms and rounds. `rollout`: fields of that section.

    vLLM runs within the workers, so that their kills strike it too.
    """
    document = {
        "run": {
            "url": str(folder),
            "seed": 11,
            "num_prompts_per_step": prompts,
            "num_generations": GENERATIONS,
        },
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "limit": prompts},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": length},
        "rollout": {
            "engine": engine,
            "vllm": {"process": "same"},
            "context_length": length + 64,
            **rollout,
        },
        "pools": {"rollout": {"count": slots, "interruptible": True}},
    }
    prepare(parse(document), "benchmark", SystemClock())
    return str(folder)


def plan_run(folder: Path, model: Path, size: Size) -> str:
    """Create the run of one arm."""
    return make_run(
        folder,
        model,
        prompts=size.prompts,
        length=size.length,
        slots=SLOTS,
        max_responses_in_flight=IN_FLIGHT,
        flush_interval_s=size.flush_interval_s,
        heartbeat_interval_s=size.flush_interval_s,
        idle_timeout_s=0.0,  # slots only resume their own responses; benchmarks/storm.py measures how they help others
    )


def journal_of(store: ObjectStore) -> tuple[list[Assembled], int]:
    """Every response of the iteration, and the number of tokens in all shards, whether they count or not."""
    plan = read_plan(store, 0)
    reader = JournalReader(store, plan)
    reader.refresh()
    assembled = [reader.assemble(response) for response in range(plan.num_responses)]
    return assembled, sum(reader.shards.tokens(name) for name in reader.book.incarnations)


def lost_at(kill: Killed, store: ObjectStore) -> tuple[int, float]:
    """The number of tokens decoded but not journalled at a kill, and the age in seconds of the oldest one."""
    reader = JournalReader(store, read_plan(store, 0))
    kept = 0
    for key in store.list(layout.alive_all(0)):
        alive = records.read(store, HeartbeatRecord, key)
        if alive.pid == kill.pid:
            reader.shards.advance(alive.incarnation)
            kept = reader.shards.tokens(alive.incarnation)
    rows = kill.log.rows()
    totals = accumulate(row.tokens for row in rows)
    lost_since_s = next((row.at_s for row, tokens in zip(rows, totals, strict=True) if tokens > kept), kill.at_s)
    return kill.log.tokens() - kept, kill.at_s - lost_since_s


def run_round(number: int, folder: Path, model: Path, size: Size) -> dict[str, Any]:
    """Run each of the three arms once, in an order that changes with the round."""
    per_kill = size.prompts * GENERATIONS * size.length // max(1, size.kills)
    schedule = kill_schedule(number, SLOTS, size.kills, per_kill // 4, per_kill)
    calm, storm, again = (Crew(folder / f"{name}-logs") for name in ("calm", "storm", "restart"))
    calm_url, storm_url, again_url = (plan_run(folder / n, model, size) for n in ("calm", "storm", "restart"))
    slots = range(SLOTS)
    arms: dict[str, Callable[[], float]] = {
        "undisturbed": lambda: calm.run(slot_process, [(calm_url, 0, slot) for slot in slots], [[]] * SLOTS),
        "resume": lambda: storm.run(slot_process, [(storm_url, 0, slot) for slot in slots], schedule),
        "restart": lambda: again.run(
            finished_kept_process, [(again_url, slot, str(folder / "done"), False, 0.0) for slot in slots], schedule
        ),
    }
    names = list(arms)[number % len(arms) :] + list(arms)[: number % len(arms)]
    seconds: dict[str, float] = {name: arms[name]() for name in names}
    expected, _ = journal_of(connect(calm_url))
    kept, journalled = journal_of(connect(storm_url))
    tokens = sum(len(response.token_ids) for response in expected)
    same = [(a, b) for a, b in zip(expected, kept, strict=True) if np.array_equal(a.token_ids, b.token_ids)]
    losses = [lost_at(kill, connect(storm_url)) for kill in storm.kills]
    return {
        "responses": len(expected),
        "identical": len(same),
        "logprob_difference": max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in same),
        "kills": len(storm.kills),
        "tokens": tokens,
        "tokens_lost": journalled - sum(len(response.token_ids) for response in kept),
        "regenerated": [lost for lost, _ in losses],
        "age_s": [age_s for _, age_s in losses],
        "resume_regenerated": storm.tokens() - tokens,
        "restart_regenerated": again.tokens() - tokens,
        **{f"{name}_s": value for name, value in seconds.items()},
    }


def report(rounds: list[dict[str, Any]], size: Size, cold_s: float, *, as_json: bool) -> None:
    """Print table, targets and JSON."""

    def ratio(arm: str) -> float:
        return float(statistics.median(one[f"{arm}_s"] / one["undisturbed_s"] for one in rounds))

    def total(name: str) -> int:
        return sum(one[name] for one in rounds)

    identical = total("identical") == total("responses")
    regenerated = [tokens for one in rounds for tokens in one["regenerated"]]
    ages_s = [age_s for one in rounds for age_s in one["age_s"]]
    difference = max(one["logprob_difference"] for one in rounds)
    rows = [
        {"arm": "undisturbed", "wall clock / undisturbed": 1.0, "tokens decoded again": 0},
        {
            "arm": "killed, resumed from the journal",
            "wall clock / undisturbed": ratio("resume"),
            "tokens decoded again": total("resume_regenerated"),
        },
        {
            "arm": "killed, unfinished ones restarted",
            "wall clock / undisturbed": ratio("restart"),
            "tokens decoded again": total("restart_regenerated"),
        },
    ]
    targets = [
        Target("responses", total("responses"), ">= 200"),
        Target("kills", total("kills"), ">= 20"),
        Target("share_of_responses_token_identical", total("identical") / total("responses"), ">= 1"),
        Target("largest_logprob_difference", difference, "<= 1e-4"),
        Target("tokens_lost", total("tokens_lost"), "<= 0"),
        Target("lost_work_per_kill_max_in_flush_intervals", max(ages_s) / size.flush_interval_s, "<= 1"),
    ]
    results = {
        "identical": identical,
        "tokens_lost": total("tokens_lost"),
        "tokens_regenerated": regenerated,
        "lost_work_s": [round(age_s, 4) for age_s in ages_s],
        "tokens": total("tokens"),
        "wall_clock_ratio": {"resume": ratio("resume"), "restart": ratio("restart")},
        "cold_start_s": cold_s,
    }
    notes = {"kills_per_round": size.kills, "rounds": size.rounds, "flush_interval_s": size.flush_interval_s}
    print(f"a new Python process needs {cold_s:.1f} s before it could decode; forked workers here do not pay that")
    finish("resume", rows, targets, as_json=as_json, notes=notes, results=results)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--length", type=int, default=400)
    parser.add_argument("--kills", type=int, default=20, help="per round")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--flush-interval-s", type=float, default=0.25)
    given = parser.parse_args()
    size = Size(given.prompts, given.length, given.kills, given.rounds, given.flush_interval_s)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model")
        Crew(folder / "none").warm_up()
        rounds = [run_round(number, folder / str(number), folder / "model", size) for number in range(size.rounds)]
        cold_s = cold_start_s()
    report(rounds, size, cold_s, as_json=given.json)


if __name__ == "__main__":
    main()
