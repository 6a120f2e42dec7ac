"""Schedules on Flyte 2: triggers of our tasks, made by a file of the user's, which `flyte deploy` is given.

    from workflows_flyte2.triggers import scheduled
    scheduled("my.yaml", "0 * * * *", iterations=4, name="my_run")

A trigger has no policy for a tick while an execution runs. The run's lease keeps the second execution from advancing
the run, and that execution fails at once with the name of the first.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flyte

from resources.labels import SETTINGS_ANNOTATION
from tasks.configuration.overrides import load_with
from tasks.configuration.run_config import RunConfig, dump, settings_digest
from tasks.configuration.schedules import CONTINUE_RUN, PLAN_NAME
from workflows_flyte2.hosting import fleet_of, hosts
from workflows_flyte2.training import training


def scheduled(
    config: str | Path,
    schedule: str = "0 * * * *",
    *,
    iterations: int = 4,
    overrides: Sequence[str] = (),
    name: str = CONTINUE_RUN,
) -> flyte.Trigger:
    """A trigger that adds iterations to a run at each tick. Raises ConfigError and ValueError for what cannot be.

    Args:
        config: the configuration of the run; its content becomes part of the trigger
        schedule: a cron expression of five fields, in UTC
        iterations: how many to add at each tick
        overrides: fields of the configuration to change, as "optimizer.learning_rate=1e-6"
        name: of the trigger; each run of a project needs a name of its own
    """
    return _trigger(training, name, schedule, load_with(config, overrides), count=iterations)


def scheduled_hosts(
    config: str | Path, schedule: str, *, count: int, hours: float, memory_gib: float, name: str = "fleet_hosts"
) -> flyte.Trigger:
    """A trigger that starts hosts of a fleet at each tick; as `scheduled`, with the inputs of `hosts`."""
    settings = load_with(config, ())
    fleet_of(settings)
    return _trigger(hosts, name, schedule, settings, count=count, hours=float(hours), memory_gib=float(memory_gib))


def _trigger(task: Any, name: str, schedule: str, settings: RunConfig, **inputs: float) -> flyte.Trigger:
    if not PLAN_NAME.fullmatch(name):
        raise ValueError(f"name: value {name!r}; allowed: letters, digits, '_' and '-', a letter first, up to 63")
    if any(name == each.name for each in task.triggers):
        raise ValueError(f"name: value {name!r} given to two triggers; allowed: one name for each")
    if len(schedule.split()) != 5:
        raise ValueError(f"schedule: {schedule!r} given; allowed: a cron expression of five fields")
    for what, value in inputs.items():
        if not value > 0:
            raise ValueError(f"{what}: value {value}; allowed: above 0")
    trigger = flyte.Trigger(
        name,
        automation=flyte.Cron(schedule),
        inputs={"config": dump(settings), **inputs},
        annotations={SETTINGS_ANNOTATION: settings_digest(settings)},
    )
    task.triggers = (*task.triggers, trigger)
    return trigger
