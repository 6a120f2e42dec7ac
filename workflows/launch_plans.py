"""Scheduled continuation of runs: a few more iterations at each tick, and never two executions of a run at once.

The concurrency policy skips a tick while an execution runs. The policy checks first and creates then; the run's lease
in object storage keeps two executions that it lets through from both advancing the run.
"""

import os
from pathlib import Path

from flytekit import Annotations, LaunchPlan

from resources.labels import SETTINGS_ANNOTATION
from tasks.configuration.run_config import RunConfig, dump, settings_digest
from tasks.configuration.schedules import ScheduledRun, place_of_schedule, scheduled_runs
from workflows.schedules import cron, notifications, one_at_a_time
from workflows.training import training

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gsm8k_qwen3.yaml"


def scheduled_plans() -> dict[str, LaunchPlan]:
    """The launch plans by name: those of the file in GLEANER_SCHEDULES, or `continue_run`, of one run."""
    found = scheduled_runs(os.environ, EXAMPLE).items()
    return {name: _plan(name, run, settings, place_of_schedule(os.environ, name)) for name, (run, settings) in found}


def _plan(name: str, run: ScheduledRun, settings: RunConfig, what: str) -> LaunchPlan:
    return LaunchPlan.get_or_create(
        training,
        name=name,
        schedule=cron(what, run.schedule),
        fixed_inputs={"config": dump(settings), "count": run.iterations},
        notifications=[each for notify in run.notify for each in notifications(notify)],
        concurrency=one_at_a_time(),
        annotations=Annotations({SETTINGS_ANNOTATION: settings_digest(settings)}),
    )


PLANS = scheduled_plans()
