"""Claim: a run's earlier iterations predict which groups of the next iteration will be the longest.

The benchmark trains the demo's tiny policy on few prompts, so that they recur, and walks through its records, iteration
by iteration, as conclude does: every predictor predicts an iteration before it sees the lengths. With `--run` it walks
through another run's directory. Recall is that of the longest fifth of the groups (tasks/planning/lengths.py).
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.crew_processes import Crew
from benchmarks.learning_run import EXECUTION, make_run
from benchmarks.reporting import Target, finish
from examples.warm_start import WarmStart, warm_start
from storage.journal.compaction import read_batches
from storage.records.length_tables import PREDICTORS, empty_table
from storage.records.prompt_table import read_prompts
from storage.records.run import next_iteration, read_plan, release_lease
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.configuration.data import ArithmeticConfig
from tasks.planning.lengths import RECALL_MIN, LengthScore, learn, predict, score
from tasks.planning.prompt_features import PromptFeatures, prompt_features

Floats = npt.NDArray[np.float64]
WARM_START = WarmStart(steps=150, batch=48, learning_rate=2e-3)
PROMPTS_PER_STEP = 24
GENERATIONS = 8
LENGTH_MAX = 112
SEED = 7
NEWEST, OTHER_HALF, ORACLE = "history, newest epoch only", "half of the group, of the other", "oracle"


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """An iteration: its prompts, and the lengths of its responses, [groups, samples]."""

    prompts: PromptFeatures
    lengths: Floats
    length_max: int


def record(folder: Path, iterations: int, prompts: int) -> ObjectStore:
    """Train the demo's task on `prompts` prompts for `iterations` iterations."""
    task = ArithmeticConfig()
    warm_start(folder / "model", WARM_START, lambda _step, _loss: None)
    Crew(folder / "none").warm_up()
    shape = {"num_prompts_per_step": PROMPTS_PER_STEP, "num_generations": GENERATIONS}
    engine = {"engine": "torch", "context_length": 192, "max_responses_in_flight": 96}
    run = make_run(
        folder,
        folder / "model",
        SEED,
        killed=False,
        run={"url": str(folder / "run"), "seed": SEED, **shape},
        data={"source": "arithmetic", "seed": SEED, "limit": prompts, "arithmetic": {"items_max": task.items_max}},
        sampling={"max_completion_length": LENGTH_MAX},
        rollout=engine | {"flush_interval_s": 0.2},
    )
    for iteration in range(iterations):
        run.iterate(SEED, iteration)
    store = connect(run.config.run.url)
    release_lease(store, EXECUTION)
    return store


def recorded(store: ObjectStore) -> list[Recorded]:
    """The committed iterations of a run, with the groups whose responses were all graded."""
    found = []
    for iteration in range(next_iteration(store)):
        plan = read_plan(store, iteration)
        graded = {r.response: r.length for batch in read_batches(store, iteration) for r in batch.graded}
        lengths = np.array([graded.get(response, np.nan) for response in range(plan.num_responses)], dtype=float)
        groups = lengths.reshape(-1, plan.num_generations)
        whole = ~np.isnan(groups).any(axis=1)
        prompts = prompt_features(read_prompts(store, plan))
        found.append(
            Recorded(prompts=prompts.take(whole), lengths=groups[whole], length_max=plan.sampling.max_completion_length)
        )
    return found


@dataclass
class Walk:
    """The results of walking through a run, by iteration.

    scores: by predictor. seen: the share of prompts that an earlier iteration had. learn_s: the seconds of learning.
    """

    scores: dict[str, list[LengthScore]]
    seen: list[float]
    learn_s: list[float]

    def mean(self, predictor: str, field: str, *, again: bool) -> float:
        """The mean over the scored iterations with mostly seen prompts (`again`), or over the other ones."""
        skipped = len(self.seen) - len(self.scores[predictor])
        kept = [
            one for one, seen in zip(self.scores[predictor], self.seen[skipped:], strict=True) if (seen > 0.5) == again
        ]
        return statistics.fmean(getattr(one, field) for one in kept) if kept else float("nan")


def walk(history: list[Recorded]) -> Walk:
    """Let every predictor predict each iteration, score it, and let it learn, as conclude does."""
    table = empty_table()
    walked = Walk({}, [], [])
    newest: dict[int, float] = {}
    for iteration, one in enumerate(history):
        means, half = one.lengths.mean(axis=1), one.lengths.shape[1] // 2
        digests = one.prompts.digests.tolist()
        walked.seen.append(sum(digest in newest for digest in digests) / len(digests))
        expected = predict("history", table, one.prompts, one.length_max)
        started_s = time.perf_counter()
        table, scored = learn(table, one.prompts, one.lengths, iteration=iteration, length_max=one.length_max)
        walked.learn_s.append(time.perf_counter() - started_s)
        if iteration:
            last = [newest.get(digest, other) for digest, other in zip(digests, expected.expected, strict=True)]
            scored[NEWEST] = score(last, means)
        scored[OTHER_HALF] = score(one.lengths[:, :half].mean(axis=1), one.lengths[:, half:].mean(axis=1))
        scored[ORACLE] = score(means, means)
        newest.update(zip(digests, means.tolist(), strict=True))
        for name, item in scored.items():
            walked.scores.setdefault(name, []).append(item)
    return walked


def report(history: list[Recorded], notes: dict[str, Any], *, as_json: bool) -> None:
    """Print table, targets and JSON."""
    size = history[0].lengths.shape[1]
    walked = walk(history)
    if not any(seen > 0.5 for seen in walked.seen):
        raise SystemExit("no iteration had prompts that were seen before; allowed: a run of more than one epoch")
    order = [*PREDICTORS, *(name for name in walked.scores if name not in PREDICTORS)]
    rows = [
        {
            "predictor": name,
            "recall, epoch 1": walked.mean(name, "recall", again=False),
            "recall, later": walked.mean(name, "recall", again=True),
            "rank correlation, epoch 1": walked.mean(name, "rank_correlation", again=False),
            "rank correlation, later": walked.mean(name, "rank_correlation", again=True),
        }
        for name in order
    ]
    learned = PREDICTORS[:-1]
    later = [walked.mean(name, "recall", again=True) for name in learned]
    half = walked.mean(OTHER_HALF, "recall", again=True)
    targets = [
        Target("best_recall_in_later_epochs", max(later), ">= 0.8"),
        # The other half of a group, sampled from the same policy, shows what a few responses can tell at best.
        Target("best_recall_less_that_of_half_of_the_group", max(later) - half, ">= 0"),
        Target("worst_recall_in_later_epochs", min(later), f">= {RECALL_MIN}"),
        Target(
            "best_recall_of_unseen_prompts",
            max(walked.mean(name, "recall", again=False) for name in learned),
            f">= {RECALL_MIN}",
        ),
        Target("seconds_to_learn_an_iteration", max(walked.learn_s), "< 1"),
    ]
    results = {
        "by_iteration": {
            name: [[one.recall, one.rank_correlation] for one in scores] for name, scores in walked.scores.items()
        },
        "seen": walked.seen,
        "mean_length": [float(one.lengths.mean()) for one in history],
    }
    notes = notes | {"iterations": len(history), "groups": len(history[0].lengths), "generations": size}
    finish("predictors", rows, targets, as_json=as_json, notes=notes, results=results)


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=2 * PROMPTS_PER_STEP, help="how many the run has")
    parser.add_argument("--run", help="url of a run whose prompts recur, such as the demo's with a small data.limit")
    given = parser.parse_args()
    if given.run:
        report(recorded(connect(given.run)), {"run": given.run}, as_json=given.json)
        return
    with tempfile.TemporaryDirectory() as temporary:
        history = recorded(record(Path(temporary), given.iterations, given.prompts))
    report(history, {"prompts": given.prompts}, as_json=given.json)


if __name__ == "__main__":
    main()
