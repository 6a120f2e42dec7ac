"""Scheduled continuation of a run: a few more iterations at each tick, and never two executions at once.

The concurrency policy skips a tick while an execution runs. The policy checks first and creates then; the run's lease
in object storage keeps two executions that it lets through from both advancing the run.
"""

import os
from pathlib import Path

from flytekit import ConcurrencyLimitBehavior, ConcurrencyPolicy, CronSchedule, LaunchPlan

from tasks.configuration.run_config import dump, load
from workflows.training import training

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gsm8k_qwen3.yaml"
CONFIG = Path(os.environ.get("GLEANER_RUN_CONFIG", EXAMPLE))
SCHEDULE = os.environ.get("GLEANER_SCHEDULE", "0 * * * *")
ITERATIONS_PER_TICK = 4

# flytekit would accept a sixth field, and flyteadmin would read it as a different schedule.
if not SCHEDULE.startswith("@") and len(SCHEDULE.split()) != 5:
    raise ValueError(f"GLEANER_SCHEDULE: {SCHEDULE!r} given; allowed: a cron expression of five fields, or @daily etc.")

continue_run = LaunchPlan.get_or_create(
    training,
    name="continue_run",
    schedule=CronSchedule(schedule=SCHEDULE),
    fixed_inputs={"config": dump(load(CONFIG)), "count": ITERATIONS_PER_TICK},
    concurrency=ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP),
)
