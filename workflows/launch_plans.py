"""Scheduled continuation of runs: a few more iterations at each tick, and never two executions of a run at once.

The concurrency policy skips a tick while an execution runs. The policy checks first and creates then; the run's lease
in object storage keeps two executions that it lets through from both advancing the run.
"""

import os
from pathlib import Path

from flytekit import LaunchPlan

from tasks.configuration.run_config import RunConfig, dump, load
from tasks.configuration.schedules import ScheduledRun, load_schedules
from workflows.schedules import cron, notifications, one_at_a_time
from workflows.training import training

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gsm8k_qwen3.yaml"
ONE_RUN = ("GLEANER_RUN_CONFIG", "GLEANER_SCHEDULE")
SEVERAL_RUNS = "GLEANER_SCHEDULES"


def scheduled_plans() -> dict[str, LaunchPlan]:
    """The launch plans by name: those of the file in GLEANER_SCHEDULES, or `continue_run`, of one run."""
    file = os.environ.get(SEVERAL_RUNS)
    if file is None:
        config = os.environ.get(ONE_RUN[0], str(EXAMPLE))
        run = ScheduledRun(config=config, schedule=os.environ.get(ONE_RUN[1], "0 * * * *"))
        return {"continue_run": _plan("continue_run", run, load(config), ONE_RUN[1])}
    for variable in ONE_RUN:
        if variable in os.environ:
            raise ValueError(f"{variable}: allowed: unset, because {SEVERAL_RUNS} names a file with all runs")
    found = load_schedules(Path(file)).items()
    return {name: _plan(name, run, settings, f"{file}: {name}.schedule") for name, (run, settings) in found}


def _plan(name: str, run: ScheduledRun, settings: RunConfig, what: str) -> LaunchPlan:
    return LaunchPlan.get_or_create(
        training,
        name=name,
        schedule=cron(what, run.schedule),
        fixed_inputs={"config": dump(settings), "count": run.iterations},
        notifications=[each for notify in run.notify for each in notifications(notify)],
        concurrency=one_at_a_time(),
    )


PLANS = scheduled_plans()
