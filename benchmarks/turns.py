"""Claim: trajectories with tools survive kills token by token, no answered call is made again, and turns cost little.

Two parts, each of which prints its claims when it has ended: a rollout whose members are killed at random, against an
undisturbed one, with the tool's own ledger as the judge; and the speed of decoding with turns against single-turn
decoding of responses of the same lengths. Workers are processes, and kills are SIGKILL.
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.crew_processes import Crew, LoggedEngine, StepLog, kill_schedule, paced_slot_process
from benchmarks.reporting import Target, finish, interleave, measured, ratios
from benchmarks.resume import journal_of
from examples.call_ledger import Audit, CallLedger, audited
from examples.hidden_sums import LEDGER, dataset_rows
from examples.tools_warm_start import warm_start
from examples.warm_start import WarmStart
from storage.clock import SystemClock
from storage.journal.assembly import Assembled
from storage.journal.turns import TurnRecord, decode_turn
from storage.records.records import SamplingParams
from storage.stores.connect import connect
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.run_config import parse
from tasks.preparing.iteration import prepare
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.engines.engine import Engine, GenerationRequest
from tasks.sampling.session.member import generate_slot

SLOTS, GENERATIONS, IN_FLIGHT = 2, 4, 8
INSTANT, SLOW = "examples.hidden_sums:HiddenSums", "benchmarks.slow_sums:SlowSums"
LENGTH_MAX, CONTEXT_LENGTH = 112, 192


@dataclass(frozen=True)
class Size:
    """The sizes of the parts.

    Attributes:
        kills, prompts: of the killed rollout.
        speed_prompts, step_s: of the arms whose speed is compared.
    """

    prompts: int
    kills: int
    speed_prompts: int
    step_s: float
    rounds: int


def make_run(
    folder: Path,
    model: Path,
    prompts: int,
    environment: str | None,
    side_effects: Sequence[str] = (),
) -> str:
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
        "sampling": {"max_completion_length": LENGTH_MAX},
        "rollout": {
            "engine": "torch",
            "context_length": CONTEXT_LENGTH,
            "max_responses_in_flight": IN_FLIGHT,
            "flush_interval_s": 0.25,
            "idle_timeout_s": 0.0,
        },
        "pools": {"rollout": {"count": SLOTS, "interruptible": True}},
    }
    if environment:
        document["turns"] = {
            "environment": environment,
            "call_time_limit_s": 60.0,
            "side_effects": list(side_effects),
        }
    prepare(parse(document), "benchmark", SystemClock())
    return str(folder)


def ledger_process(run_url: str, iteration: int, slot: int, step_s: float, ledger: str, log_path: str) -> None:
    """The body of a worker whose tools note their calls in a ledger; "" for none."""
    os.environ.pop(LEDGER, None)
    if ledger:
        os.environ[LEDGER] = ledger
    paced_slot_process(run_url, iteration, slot, step_s, log_path)


class EndingEngine(LoggedEngine):
    """Ends each response after a given number of tokens, and not before: no token stops it."""

    def __init__(self, engine: Engine, log: StepLog, step_time_s: float, lengths: dict[str, int]) -> None:
        super().__init__(engine, log, step_time_s)
        self._lengths = lengths

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        super().start([replace(request, sampling=self._sampling(request)) for request in requests])

    def _sampling(self, request: GenerationRequest) -> SamplingParams:
        length = self._lengths[str(request.response)]
        return replace(request.sampling, max_completion_length=length, stop_token_ids=())


def ending_process(run_url: str, iteration: int, slot: int, step_s: float, lengths: str, log_path: str) -> None:
    """The body of a worker whose responses end after as many tokens as the JSON file `lengths` says."""

    def build(config: RolloutConfig, model_dir: Path, vocab_size: int) -> Engine:
        engine = build_engine(config, model_dir, vocab_size)
        return EndingEngine(engine, StepLog(Path(log_path)), step_s, json.loads(Path(lengths).read_text()))

    generate_slot(run_url, iteration, slot, lambda: False, SystemClock(), build)


def run_crew(
    folder: Path,
    url: str,
    step_s: float,
    file: Path | None,
    schedule: list[list[int]],
    body: Callable[[str, int, int, float, str, str], None] = ledger_process,
) -> tuple[Crew, float]:
    """Generate the run's iteration with two workers, which get `file`; the crew and the seconds."""
    crew = Crew(folder)
    arguments = [(url, 0, slot, step_s, str(file or "")) for slot in range(SLOTS)]
    return crew, crew.run(body, arguments, schedule)


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
class Part:
    """The results of a part: rows of the table, claims, and what else the JSON object has."""

    rows: list[dict[str, Any]]
    targets: list[Target]
    results: dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """What a killed rollout kept of the undisturbed one."""

    trajectories: int
    identical: int
    kills: int
    audit: Audit


def killed_rollout(folder: Path, model: Path, size: Size) -> Kept:
    """Generate the same iteration undisturbed and with kills, and compare."""
    # Each turn is in the journal before its call, so a call that is made again is one that the journal knows.
    calm_url, storm_url = (
        make_run(folder / name, model, size.prompts, INSTANT, side_effects=["look"]) for name in ("calm", "storm")
    )
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
    )


def speeds(folder: Path, model: Path, size: Size) -> dict[str, list[float]]:
    """The policy's tokens per second of each arm, round by round.

    A response has as many of the policy's tokens in each arm, or the arms would differ in how long they wait for their
    last responses, too.
    """
    folder.mkdir()

    def arm(name: str, environment: str | None, lengths: Path | None = None) -> tuple[list[int], float]:
        place = Path(tempfile.mkdtemp(prefix=name, dir=folder))
        url = make_run(place / "run", model, size.speed_prompts, environment)
        body = ledger_process if lengths is None else ending_process
        _, seconds = run_crew(place / "logs", url, size.step_s, lengths, [[]] * SLOTS, body)
        found = [response.policy_length for response in journal_of(connect(url))[0]]
        return found, sum(found) / seconds

    # Sampling is keyed, so the responses with turns have the same lengths in every round.
    wanted, _ = arm("lengths", INSTANT)
    lengths = folder / "lengths.json"
    lengths.write_text(json.dumps(dict(enumerate(wanted))))

    def rate(name: str, environment: str | None, lengths: Path | None = None) -> float:
        found, tokens_per_s = arm(name, environment, lengths)
        assert found == wanted, f"{name}: responses of other lengths"
        return tokens_per_s

    arms = {
        "single": lambda: rate("single", None, lengths),
        "instant": lambda: rate("instant", INSTANT),
        "slow": lambda: rate("slow", SLOW),
    }
    return interleave(arms, size.rounds)


def kills_targets(kept: Kept) -> list[Target]:
    """The claims about kills."""
    return [
        Target("trajectories", kept.trajectories, ">= 200"),
        Target("kills", kept.kills, ">= 20"),
        Target("share_identical", kept.identical / kept.trajectories, ">= 1"),
        Target("calls_repeated", len(kept.audit.repeated), "<= 0"),
        Target("calls_untold", len(kept.audit.untold), "<= 0"),
    ]


def speed_targets(found: dict[str, list[float]]) -> list[Target]:
    """The claims about speed."""
    return [
        ratios(found["instant"], found["single"]).target("speed_with_instant_tools", ">= 0.9"),
        ratios(found["slow"], found["single"]).target("speed_with_slow_tools", ">= 0.8"),
    ]


def kills_part(folder: Path, model: Path, size: Size) -> Part:
    """What a rollout keeps whose members are killed."""
    kept = killed_rollout(folder, model, size)
    results = {
        "identical": kept.identical == kept.trajectories,
        "calls_repeated": len(kept.audit.repeated),
        "calls": kept.audit.calls,
        "calls_unknown": len(kept.audit.unknown),
        "calls_made_again": len(kept.audit.again),
        "turns": kept.audit.turns,
    }
    return Part([], kills_targets(kept), results)


def speed_part(folder: Path, model: Path, size: Size) -> Part:
    """The speed of decoding with turns."""
    found = speeds(folder, model, size)
    return Part(
        [{"arm": name, "tokens/s": measured(values)} for name, values in found.items()], speed_targets(found), {}
    )


PARTS = {"kills": kills_part, "speed": speed_part}


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--policy", type=Path, help="made by examples/tools_warm_start.py; by default it is made anew")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--speed-prompts", type=int, default=96)
    parser.add_argument("--step-s", type=float, default=0.05, help="the least duration of a decode step, for speeds")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    # As on one machine in production (tasks/local_map.py); torch reads it when the workers' server imports it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // SLOTS)))
    size = Size(given.prompts, given.kills, given.speed_prompts, given.step_s, given.rounds)
    whole = Part([], [], {})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = given.policy or folder / "policy"
        if not given.policy:
            warm_start(model, WarmStart(), lambda _step, _loss: None)
        Crew(folder / "none").warm_up()
        for name in given.parts:
            part = PARTS[name](folder / name, model, size)
            for target in part.targets:
                print(f"{name}: {target.name} {target.value:.3f} ({target.bound})", flush=True)
            whole = Part(whole.rows + part.rows, whole.targets + part.targets, whole.results | part.results)
    notes = {
        "rounds": size.rounds,
        "step_s": size.step_s,
        "in_flight": IN_FLIGHT,
        "threads_of_a_worker": os.environ["OMP_NUM_THREADS"],
    }
    finish("turns", whole.rows, whole.targets, as_json=given.json, notes=notes, results=whole.results)


if __name__ == "__main__":
    main()
