"""Scheduled continuation of runs: a few more iterations at each tick, and never two executions of a run at once.

The concurrency policy skips a tick while an execution runs. The policy checks first and creates then; the run's lease
in object storage keeps two executions that it lets through from both advancing the run.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from flytekit import Annotations, LaunchPlan

from resources.labels import SETTINGS_ANNOTATION
from tasks.configuration.overrides import load_with
from tasks.configuration.run_config import RunConfig, dump, settings_digest
from tasks.configuration.schedules import CONTINUE_RUN, PLAN_NAME, NotifyConfig, environment_runs, place_of_schedule
from workflows.count import Count
from workflows.schedules import cron, notifications, one_at_a_time
from workflows.training import training
from workflows.uploads import take_along


def scheduled(
    config: str | Path,
    schedule: str = "0 * * * *",
    *,
    iterations: int = 4,
    overrides: Sequence[str] = (),
    notify: Sequence[NotifyConfig] = (),
    name: str = CONTINUE_RUN,
) -> LaunchPlan:
    """A launch plan that adds iterations to a run at each tick, unless its last execution still runs.

    The configuration and the number of iterations are default inputs: an execution that is launched by hand may have
    others. Raises ConfigError and ValueError for what cannot be.

    Args:
        config: the configuration of the run; its content becomes part of the plan
        schedule: a cron expression of five fields, or @daily and the like, in UTC
        iterations: how many to add at each tick
        overrides: fields of the configuration to change, as "optimizer.learning_rate=1e-6"
        notify: the addresses that Flyte tells of an end
        name: of the plan; each run of a project needs a plan of another name, and has one plan
    """
    settings = load_with(config, overrides)
    if not PLAN_NAME.fullmatch(name):
        raise ValueError(f"name: value {name!r}; allowed: letters, digits, '_' and '-', a letter first, up to 63")
    if name in LaunchPlan.CACHE:
        raise ValueError(f"name: value {name!r} given to two launch plans; allowed: one name for each")
    return _plan(name, settings, schedule, iterations, notify, "schedule")


def _plan(
    name: str, settings: RunConfig, schedule: str, iterations: int, notify: Sequence[NotifyConfig], what: str
) -> LaunchPlan:
    take_along(settings)
    return LaunchPlan.get_or_create(
        training,
        name=name,
        schedule=cron(what, schedule),
        default_inputs={"config": dump(settings), "count": Count(iterations)},
        notifications=[each for told in notify for each in notifications(told)],
        concurrency=one_at_a_time(),
        annotations=Annotations({SETTINGS_ANNOTATION: settings_digest(settings)}),
    )


def plans_of_the_environment() -> dict[str, LaunchPlan]:
    """The launch plans that GLEANER_SCHEDULES, or GLEANER_RUN_CONFIG and GLEANER_SCHEDULE, ask for, by name.

    The variables go with the next release; `scheduled` takes their place.
    """
    return {
        name: _plan(name, settings, run.schedule, run.iterations, run.notify, place_of_schedule(os.environ, name))
        for name, (run, settings) in environment_runs(os.environ).items()
    }


PLANS = plans_of_the_environment()
