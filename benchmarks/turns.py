"""Claim: trajectories with tools survive kills token by token, no answered call is made again, and turns cost little.

Three parts: a rollout whose members are killed at random, against an undisturbed one, with the tool's own ledger as
the judge; the speed of decoding with turns against single-turn decoding of as many tokens; and what it saves that a
response finds its row again (`row_reuse.py`). Workers are processes, and kills are SIGKILL.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.crew_processes import Crew, kill_schedule, paced_slot_process
from benchmarks.reporting import Measured, Target, finish, interleave, measured, ratios
from benchmarks.resume import journal_of
from benchmarks.row_reuse import Turns, decode_turns, turn_engine
from examples.call_ledger import Audit, CallLedger, audited
from examples.hidden_sums import LEDGER, dataset_rows
from examples.tools_warm_start import warm_start
from examples.warm_start import WarmStart
from storage.assembly import Assembled
from storage.clock import SystemClock
from storage.connect import connect
from storage.turns import TurnRecord, decode_turn
from tasks.configuration.run_config import parse
from tasks.preparing.iteration import prepare

SLOTS, GENERATIONS, IN_FLIGHT = 2, 4, 8
INSTANT, SLOW = "examples.hidden_sums:HiddenSums", "benchmarks.slow_sums:SlowSums"
LENGTH_MAX, CONTEXT_LENGTH = 112, 192


@dataclass(frozen=True)
class Size:
    """kills, prompts: of the killed rollout. speed_prompts, step_s: of the arms whose speed is compared."""

    prompts: int
    kills: int
    speed_prompts: int
    step_s: float
    rounds: int
    turns: int


def make_run(folder: Path, model: Path, prompts: int, environment: str | None, length: int = LENGTH_MAX) -> str:
    """Create a run with one planned iteration; without an environment, it is single-turn."""
    rng = random.Random(5)
    folder.parent.mkdir(parents=True, exist_ok=True)
    data = folder.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in islice(dataset_rows(rng), prompts)))
    document: dict[str, Any] = {
        "run": {
            "url": str(folder),
            "seed": 11,
            "num_prompts_per_step": prompts,
            "num_generations": GENERATIONS,
        },
        "policy": {"path": str(model)},
        "data": {"source": str(data)},
        "rewards": [{"function": "examples.hidden_sums:right_sum"}],
        "sampling": {"max_completion_length": length},
        "rollout": {
            "engine": "torch",
            "context_length": CONTEXT_LENGTH,
            "max_responses_in_flight": IN_FLIGHT,
            "flush_interval_s": 0.25,
            "heartbeat_interval_s": 0.25,
            "idle_timeout_s": 0.0,
        },
        "pools": {"rollout": {"count": SLOTS, "interruptible": True}},
    }
    if environment:
        document["turns"] = {"environment": environment, "call_time_limit_s": 60.0}
    prepare(parse(document), "benchmark", SystemClock())
    return str(folder)


def endless_policy(model: Path, folder: Path) -> Path:
    """A copy of the policy whose stop token is one that it never samples, so that its responses have equal lengths."""
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.save_pretrained(folder)
    # The model's own stop tokens count, too.
    for path in (folder / "config.json", folder / "generation_config.json"):
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields | {"eos_token_id": tokenizer.pad_token_id}))
    return folder


def ledger_process(run_url: str, iteration: int, slot: int, step_s: float, ledger: str, log_path: str) -> None:
    """The body of a worker whose tools note their calls in a ledger; "" for none."""
    os.environ.pop(LEDGER, None)
    if ledger:
        os.environ[LEDGER] = ledger
    paced_slot_process(run_url, iteration, slot, step_s, log_path)


def run_crew(
    folder: Path, url: str, step_s: float, ledger: Path | None, schedule: list[list[int]]
) -> tuple[Crew, float]:
    """Generate the run's iteration with two workers; the crew and the seconds."""
    crew = Crew(folder)
    arguments = [(url, 0, slot, step_s, str(ledger or "")) for slot in range(SLOTS)]
    return crew, crew.run(ledger_process, arguments, schedule)


def same(first: Assembled, second: Assembled) -> bool:
    """Whether two trajectories have the same tokens, by whom they were written, their end and their reward."""
    rewards = [[record.reward for record in records_of([one])] for one in (first, second)]
    return (
        np.array_equal(first.token_ids, second.token_ids)
        and (first.origins, first.finish) == (second.origins, second.finish)
        and rewards[0] == rewards[1]
    )


def records_of(responses: list[Assembled]) -> list[TurnRecord]:
    return [decode_turn(event) for response in responses for event in response.events]


@dataclass(frozen=True)
class Kept:
    """What a killed rollout kept of the undisturbed one. length: the mean number of the policy's tokens."""

    trajectories: int
    identical: int
    kills: int
    audit: Audit
    length: float


def killed_rollout(folder: Path, model: Path, size: Size) -> Kept:
    """Generate the same iteration undisturbed and with kills, and compare."""
    calm_url, storm_url = (make_run(folder / name, model, size.prompts, INSTANT) for name in ("calm", "storm"))
    run_crew(folder / "calm-logs", calm_url, 0.0, None, [[]] * SLOTS)
    expected, _ = journal_of(connect(calm_url))
    policy_tokens = sum(response.policy_length for response in expected)
    per_kill = policy_tokens // max(1, size.kills)
    schedule = kill_schedule(0, SLOTS, size.kills, per_kill // 4, per_kill)
    ledger = folder / "ledger.sqlite"
    crew, _ = run_crew(folder / "storm-logs", storm_url, 0.0, ledger, schedule)
    kept, _ = journal_of(connect(storm_url))
    return Kept(
        trajectories=len(expected),
        identical=sum(map(same, expected, kept)),
        kills=len(crew.kills),
        audit=audited(CallLedger(ledger).rows(0), records_of(kept)),
        length=policy_tokens / len(expected),
    )


def speeds(folder: Path, model: Path, size: Size, length: float) -> dict[str, list[float]]:
    """The policy's tokens per second of each arm, round by round; all arms decode about as many tokens."""
    endless = endless_policy(model, folder / "endless")

    def arm(name: str, policy: Path, environment: str | None, longest: int) -> float:
        place = Path(tempfile.mkdtemp(prefix=name, dir=folder))
        url = make_run(place / "run", policy, size.speed_prompts, environment, longest)
        _, seconds = run_crew(place / "logs", url, size.step_s, None, [[]] * SLOTS)
        responses, _ = journal_of(connect(url))
        return sum(response.policy_length for response in responses) / seconds

    arms = {
        "single": lambda: arm("single", endless, None, round(length)),
        "instant": lambda: arm("instant", model, INSTANT, LENGTH_MAX),
        "slow": lambda: arm("slow", model, SLOW, LENGTH_MAX),
    }
    return interleave(arms, size.rounds)


def reuse(folder: Path, size: Size) -> tuple[dict[str, list[Turns]], Measured]:
    """Turns with the rows of before and without, round by round, and the ratio of their processor times."""
    folder.mkdir(parents=True, exist_ok=True)
    engine, weights = turn_engine(folder, IN_FLIGHT, size.turns)
    found: dict[str, list[Turns]] = {"again": [], "reused": []}

    def arm(name: str) -> float:
        decoded = decode_turns(engine, weights, IN_FLIGHT, size.turns, reuses=name == "reused")
        found[name].append(decoded)
        return decoded.cpu_s

    times = interleave({name: partial(arm, name) for name in found}, size.rounds)
    return found, ratios(times["again"], times["reused"])


def reuse_targets(found: dict[str, list[Turns]], ratio: Measured) -> list[Target]:
    """The claims about rows that are found again."""
    equal = all(one.token_ids == other.token_ids for one, other in zip(found["again"], found["reused"], strict=True))
    return [Target("rows_reused_same_tokens", float(equal), "== 1"), ratio.target("rows_reused_cpu_ratio", "> 1")]


def rollout_targets(kept: Kept, found: dict[str, list[float]]) -> list[Target]:
    """The claims about kills and speed."""
    return [
        Target("trajectories", kept.trajectories, ">= 200"),
        Target("kills", kept.kills, ">= 20"),
        Target("share_identical", kept.identical / kept.trajectories, ">= 1"),
        Target("calls_repeated", len(kept.audit.repeated), "<= 0"),
        Target("calls_untold", len(kept.audit.untold), "<= 0"),
        ratios(found["instant"], found["single"]).target("speed_with_instant_tools", ">= 0.9"),
        ratios(found["slow"], found["single"]).target("speed_with_slow_tools", ">= 0.8"),
    ]


def report(
    kept: Kept | None,
    found: dict[str, list[float]],
    turns: dict[str, list[Turns]],
    ratio: Measured,
    size: Size,
    *,
    as_json: bool,
) -> None:
    """Print table, targets and JSON."""
    rows: list[dict[str, Any]] = [{"arm": name, "tokens/s": measured(values)} for name, values in found.items()]
    rows += [
        {
            "arm": f"rows: {name}",
            "processor s": statistics.median(one.cpu_s for one in values),
            "tokens prefilled": values[0].prefill_tokens,
        }
        for name, values in turns.items()
    ]
    targets, results = reuse_targets(turns, ratio), {}
    if kept is not None:
        targets = rollout_targets(kept, found) + targets
        results = {
            "identical": kept.identical == kept.trajectories,
            "calls_repeated": len(kept.audit.repeated),
            "calls": kept.audit.calls,
            "calls_unknown": len(kept.audit.unknown),
            "calls_made_again": len(kept.audit.again),
            "turns": kept.audit.turns,
        }
    notes = {"rounds": size.rounds, "step_s": size.step_s, "in_flight": IN_FLIGHT, "turns": size.turns}
    finish("turns", rows, targets, as_json=as_json, notes=notes, results=results)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows-only", action="store_true", help="only what it saves to find a row again")
    parser.add_argument("--policy", type=Path, help="made by examples/tools_warm_start.py; by default it is made anew")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--speed-prompts", type=int, default=192)
    parser.add_argument("--step-s", type=float, default=0.05, help="the least duration of a decode step, for speeds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=24, help="of a response, where rows are found again")
    given = parser.parse_args()
    size = Size(given.prompts, given.kills, given.speed_prompts, given.step_s, given.rounds, given.turns)
    kept, found = None, {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        turns, ratio = reuse(folder / "engine", size)
        if not given.rows_only:
            model = given.policy or folder / "policy"
            if not given.policy:
                warm_start(model, WarmStart(), lambda _step, _loss: None)
            Crew(folder / "none").warm_up()
            kept = killed_rollout(folder / "kills", model, size)
            found = speeds(folder, model, size, kept.length)
    report(kept, found, turns, ratio, size, as_json=given.json)


if __name__ == "__main__":
    main()
