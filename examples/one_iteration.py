"""One iteration of a run from its plan to its report, in one process and without Flyte. Read it from top to bottom.

Run: python -m examples.one_iteration (a minute on a CPU). A cluster runs the same functions, each in a task of its own:
`tasks/plan.py`, `tasks/rollout.py` (one task for each slot), `tasks/train.py` and `tasks/conclude.py`.
"""

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import gleaner
from examples.warm_start import WarmStart, warm_start
from storage.clock import SystemClock
from storage.records import layout
from storage.records.records import PlanRecord, ReportRecord
from storage.records.run import read_plan
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.configuration.data import ArithmeticConfig
from tasks.configuration.run_config import RunConfig, parse
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.session.member import generate_slot
from tasks.sampling.session.session_outcome import Preempted

# A run belongs to one execution at a time; on Flyte this is the execution's name.
EXECUTION = "one-iteration"
CLOCK = SystemClock()
# Running sums of up to three digits, which a tiny policy learns in seconds.
TASK = ArithmeticConfig(items_max=3, stop_probability=0.4)


def configuration(folder: Path) -> RunConfig:
    """The same document that a YAML file holds; docs/guide/configuration.md has every field."""
    return parse(
        {
            "run": {"url": str(folder / "run"), "seed": 7, "num_prompts_per_step": 8, "num_generations": 8},
            "policy": {"path": str(folder / "policy")},
            "data": {"source": "arithmetic", "limit": 64, "arithmetic": asdict(TASK)},
            "rewards": [{"function": "arithmetic"}],
            "sampling": {"max_completion_length": 96},
            # A member writes what it has decoded after each interval: that is all that a lost machine can cost.
            "rollout": {
                "engine": "torch",
                "context_length": 192,
                "max_responses_in_flight": 4,
                "flush_interval_s": 0.05,
            },
            "pools": {"rollout": {"count": 2, "interruptible": True}},
        }
    )


def plan_prompts(config: RunConfig) -> PlanRecord:
    """Plan: draw prompts, and give each group of responses to a slot. The plan is stored; all other tasks read it."""
    reference, _ = prepare(config, EXECUTION, CLOCK)
    plan = read_plan(connect(config.run.url), reference.iteration)
    for slot in plan.slots:
        print(f"  slot {slot.slot} of pool {slot.pool!r} has groups {sorted(slot.groups)}")
    return plan


def generate(store: ObjectStore, url: str, plan: PlanRecord) -> None:
    """Roll out: each slot generates its responses and journals every token. The first machine is lost on the way."""

    def lost() -> bool:
        # A spot machine gets notice; here it comes once some tokens are in the store.
        return bool(store.list(layout.journal(plan.iteration)))

    def kept() -> bool:
        return False

    try:
        roll_out(url, plan, 0, lost)
    except Preempted:
        print("  slot 0 has lost its machine")
    for slot in plan.slots:
        roll_out(url, plan, slot.slot, kept)


def roll_out(url: str, plan: PlanRecord, slot: int, has_notice: Callable[[], bool]) -> None:
    """One life of a slot. It claims responses, and goes on with each at the token where the journal ends."""
    outcome = generate_slot(url, plan.iteration, slot, has_notice, CLOCK, execution=EXECUTION)
    print(
        f"  slot {slot}: {outcome.responses_finished} responses ended, {outcome.tokens_generated:,} tokens generated, "
        f"{outcome.tokens_recovered:,} taken from the journal"
    )


def train(url: str, plan: PlanRecord) -> None:
    """Train: read groups from the journal, grade responses, take the optimizer step, publish the next weights."""
    record = train_iteration(url, plan.iteration, EXECUTION, CLOCK)
    print(f"  weight version {record.weight_version}, mean reward {record.metrics['reward']:.3f}")


def conclude(store: ObjectStore, plan: PlanRecord) -> ReportRecord:
    """Conclude: verify that no token is missing, doubled or changed, and commit the iteration with its metrics."""
    report = conclude_iteration(store, plan.iteration, {"rollout": 0.4, "train": 0.8}, CLOCK)
    print(f"  {report.metrics['num_tokens']:,.0f} tokens learned, loss {report.metrics['loss']:.4f}")
    return report


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("a policy of 0.4 million parameters learns the task's form")
        taught = WarmStart(steps=200, batch=32, learning_rate=2e-3, task=TASK)
        warm_start(Path(folder) / "policy", taught, lambda _step, _loss: None)
        config = configuration(Path(folder))
        url = config.run.url
        print("plan")
        plan = plan_prompts(config)
        store = connect(url)
        print("generate")
        generate(store, url, plan)
        print("train")
        train(url, plan)
        print("conclude")
        conclude(store, plan)
        best = max(gleaner.open(url).responses(plan.iteration).to_pylist(), key=lambda row: row["reward"])
        print(f"the best response, reward {best['reward']:.0f}: {best['prompt']}{best['completion']}")


if __name__ == "__main__":
    main()
