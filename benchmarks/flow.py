"""Claim: a crew that stands, and goes on when it has no work, makes an iteration much shorter than a map for each one.

Three arms take turns: a map per iteration; a standing crew; a standing crew with flow, up to AHEAD iterations ahead.
Each is `pyflyte run` of the training workflow on this machine: eight processes are members, journal and trainer are
real, and the policy is tiny. The engines are scripted: they sleep at each step, and lengths have a heavy tail. Rollout
binds: an engine decodes the responses of its slot in four waves, and training takes a small part of that. In every run
members are killed. On one machine the first arm generates and trains in turn, as its nodes are called. The time after
the last plan counts, in which members have nothing to go on with.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.reporting import Target, finish, interleave
from benchmarks.resume import make_model
from storage.journal.compaction import read_responses
from storage.journal.liveness import read_heartbeat
from storage.journal.noise_keys import noise_key
from storage.records import layout, prompt_table
from storage.records.records import ReportRecord, SlotLife
from storage.records.run import next_iteration, plans_in_flight, read_plan, read_run, reports
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.scripted_engine import ScriptedEngine

ROOT = Path(__file__).resolve().parent.parent
AHEAD = 2
ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "a map per iteration": {},
    "standing": {"rollout": {"crew": "standing"}},
    "standing with flow": {"rollout": {"crew": "standing"}, "algorithm": {"max_staleness": AHEAD}},
}
MEMBERS, ITERATIONS = 8, 6
# The responses that an engine decodes at once, and how many times as many its slot has.
IN_FLIGHT, WAVES, GENERATIONS = 8, 4, 4
# After so many commits a member is killed.
KILLED_AFTER = (1, 3)
LENGTH_MAX = 400
POLL_S = 0.05
TIME_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Course:
    """How a run went: its reports, the members that were killed, and how many responses are as undisturbed ones."""

    reports: tuple[ReportRecord, ...]
    killed: tuple[str, ...]
    identical: int
    responses: int

    @property
    def cycle_s(self) -> float:
        """Mean seconds from one commit to the next, after the first."""
        committed = [report.created_at_s for report in self.reports]
        return (committed[-1] - committed[0]) / (len(committed) - 1)

    @property
    def idle_share(self) -> float:
        """The share of the members' time in which they did not decode, after the first iteration."""
        return idle_share([life for report in self.reports[1:] for life in report.lives])


def idle_share(lives: Sequence[SlotLife]) -> float:
    """The share of these lives, from the process's start to its last heartbeat, without decode steps."""
    total_s = sum(life.ended_at_s - life.started_at_s for life in lives)
    return 1 - sum(life.decode_s for life in lives) / total_s


def document(url: Path, model: Path, arm: str, step_s: float) -> dict[str, Any]:
    """The configuration of an arm."""
    whole: dict[str, Any] = {
        "run": {
            "url": str(url),
            "seed": 11,
            "num_prompts_per_step": MEMBERS * IN_FLIGHT * WAVES // GENERATIONS,
            "num_generations": GENERATIONS,
        },
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "limit": 64},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": LENGTH_MAX},
        "rollout": {
            "engine": "scripted",
            "scripted_step_s": step_s,
            "context_length": LENGTH_MAX + 100,
            "max_responses_in_flight": IN_FLIGHT,
            "flush_interval_s": 0.5,
            "claim_ttl_s": 10.0,
        },
        "retention": {"keep_weights": ITERATIONS + 1},
        "trainer": {"group_timeout_s": TIME_LIMIT_S},
        "pools": {"rollout": {"count": MEMBERS, "interruptible": True}},
    }
    for section, values in ARMS[arm].items():
        whole[section] = whole.get(section, {}) | values
    return whole


def undisturbed(store: ObjectStore, iteration: int) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of each response of a plan, by an engine of its own that does not sleep."""
    plan = read_plan(store, iteration)
    prompts = prompt_table.read_prompts(store, plan)
    engine = ScriptedEngine(read_run(store).vocab_size, plan.num_responses, context_length=LENGTH_MAX + 100)
    engine.load_weights(plan.weight_version, {})
    groups = [response // plan.num_generations for response in range(plan.num_responses)]
    engine.start(
        [
            GenerationRequest(
                response,
                group,
                prompts[group].token_ids,
                (),
                noise_key(plan.run_seed, plan.iteration, response),
                plan.sampling,
            )
            for response, group in enumerate(groups)
        ]
    )
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in groups]
    while deltas := engine.step():
        for delta in deltas:
            found[delta.response][0].extend(delta.token_ids)
            found[delta.response][1].extend(delta.logprobs)
    return found


def identical(store: ObjectStore, iteration: int) -> int:
    """How many responses of a committed iteration have exactly the undisturbed tokens and log-probs."""
    expected = undisturbed(store, iteration)
    return sum(
        kept.token_ids.tolist() == expected[kept.response][0]
        and np.array_equal(kept.logprobs, np.array(expected[kept.response][1], np.float32))
        for kept in read_responses(store, iteration)
    )


def kill_one(store: ObjectStore) -> str | None:
    """SIGKILL the first member that decodes, in the oldest iteration in which one does; returns its incarnation."""
    for plan in plans_in_flight(store):
        for key in store.list(layout.alive_all(plan.iteration)):
            alive = read_heartbeat(store, key)
            if alive is not None and alive.state == "working" and alive.running:
                os.kill(alive.pid, signal.SIGKILL)
                return alive.incarnation
    return None


def run_arm(folder: Path, model: Path, arm: str, step_s: float) -> Course:
    """One run of an arm; raises RuntimeError if the workflow fails."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    config, log, store = folder / "run.yaml", folder / "log.txt", connect(str(folder / "run"))
    config.write_text(yaml.safe_dump(document(folder / "run", model, arm, step_s)))
    command = [
        str(Path(sys.executable).parent / "pyflyte"),
        *("--config", str(ROOT / "flyte.config"), "run", str(ROOT / "workflows" / "training.py"), "training"),
        *("--config", str(config), "--count", str(ITERATIONS)),
    ]
    killed: list[str] = []
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        while child.poll() is None:
            due = len(killed) < len(KILLED_AFTER) and next_iteration(store) >= KILLED_AFTER[len(killed)]
            if due and (name := kill_one(store)):
                killed.append(name)
            time.sleep(POLL_S)
    if child.returncode:
        raise RuntimeError(f"{arm}: the workflow failed: {log.read_text(errors='replace')[-2000:]}")
    done = tuple(reports(store))
    same = sum(identical(store, report.iteration) for report in done)
    return Course(done, tuple(killed), same, sum(len(report.lengths) for report in done))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.05, help="seconds that an engine sleeps at each step")
    arguments = parser.parse_args()
    courses: dict[str, list[Course]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="gleaner-flow-") as name:
        folder = Path(name)
        model = folder / "model"
        make_model(model)

        def timed(arm: str) -> float:
            courses[arm].append(run_arm(folder, model, arm, arguments.step_s))
            return courses[arm][-1].cycle_s

        cycles = interleave({arm: partial(timed, arm) for arm in ARMS}, arguments.rounds)
    medians = {arm: statistics.median(found) for arm, found in cycles.items()}
    idle = {arm: statistics.median(course.idle_share for course in found) for arm, found in courses.items()}
    every = [course for found in courses.values() for course in found]
    first, _, flow = ARMS
    finish(
        "flow",
        [
            {
                "arm": arm,
                "cycle_s": medians[arm],
                "of the first": medians[arm] / medians[first],
                "idle share": idle[arm],
                "idle share, each round": [round(course.idle_share, 3) for course in found],
                "cycle_s, each round": [round(cycle_s, 2) for cycle_s in cycles[arm]],
                "identical": f"{sum(c.identical for c in found)} of {sum(c.responses for c in found)}",
                "killed": sum(len(course.killed) for course in found),
            }
            for arm, found in courses.items()
        ],
        [
            Target("cycle of flow, of that of a map per iteration", medians[flow] / medians[first], "<= 0.75"),
            Target("idle share of members with flow", idle[flow], "<= 0.1"),
            Target("responses unlike undisturbed ones", sum(c.responses - c.identical for c in every), "== 0"),
            Target("members killed in each run", min(len(c.killed) for c in every), f"== {len(KILLED_AFTER)}"),
        ],
        as_json=arguments.json,
        notes={"members": MEMBERS, "iterations": ITERATIONS, "rounds": arguments.rounds, "step_s": arguments.step_s},
    )


if __name__ == "__main__":
    main()
