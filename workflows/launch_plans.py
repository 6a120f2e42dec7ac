"""Scheduled continuation of a run: a few more iterations at each tick, and never two executions at once.

The concurrency policy skips a tick while an execution runs. The policy checks first and creates then; the run's lease
in object storage keeps two executions that it lets through from both advancing the run.
"""

import os
from pathlib import Path

from flytekit import LaunchPlan

from tasks.configuration.run_config import dump, load
from workflows.schedules import cron, one_at_a_time
from workflows.training import training

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gsm8k_qwen3.yaml"
CONFIG = Path(os.environ.get("GLEANER_RUN_CONFIG", EXAMPLE))
SCHEDULE = os.environ.get("GLEANER_SCHEDULE", "0 * * * *")
ITERATIONS_PER_TICK = 4

continue_run = LaunchPlan.get_or_create(
    training,
    name="continue_run",
    schedule=cron("GLEANER_SCHEDULE", SCHEDULE),
    fixed_inputs={"config": dump(load(CONFIG)), "count": ITERATIONS_PER_TICK},
    concurrency=one_at_a_time(),
)
