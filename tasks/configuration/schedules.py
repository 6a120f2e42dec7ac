"""Scheduled runs: configurations, their times, and the addresses that Flyte tells of an end.

Variables of the environment name a file of them, or one run.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from resources.documents import DocumentError, read_document
from tasks.configuration.problems import not_json, problems
from tasks.configuration.run_config import RunConfig, load

PLAN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
Phase = Literal["succeeded", "failed", "timed_out", "aborted"]
Addresses = tuple[Annotated[str, Field(pattern=r"^[^@\s,]+@[^@\s,]+$")], ...]


@dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """Mail addresses that Flyte writes to when an execution ends in one of `phases`.

    Slack and PagerDuty take mail at addresses of their own, too; Flyte knows the three apart.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)] = ("failed", "timed_out", "aborted")
    email: Addresses = ()
    slack: Addresses = ()
    pager_duty: Addresses = ()

    def __post_init__(self) -> None:
        if not (self.email or self.slack or self.pager_duty):
            raise ValueError("allowed: addresses in at least one of email, slack, pager_duty")


@dataclass(frozen=True, kw_only=True)
class ScheduledRun:
    """A run that Flyte continues by a schedule.

    Attributes:
        config: A configuration file, from the folder of the file that names the run.
        schedule: Times, in cron's notation.
        iterations: Iterations to add at each tick.
        notify: Who is told of an end.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    config: Annotated[str, Field(min_length=1)]
    schedule: Annotated[str, Field(min_length=1)] = "0 * * * *"
    iterations: Annotated[int, Field(ge=1)] = 4
    notify: tuple[NotifyConfig, ...] = ()


_ADAPTER = TypeAdapter(ScheduledRun)
SEVERAL_RUNS = "GLEANER_SCHEDULES"
ONE_RUN = ("GLEANER_RUN_CONFIG", "GLEANER_SCHEDULE")
# The launch plan of one run.
CONTINUE_RUN = "continue_run"


def environment_runs(environment: Mapping[str, str]) -> dict[str, tuple[ScheduledRun, RunConfig]]:
    """The scheduled runs that an environment names, by the names of their launch plans, with their configurations.

    Raises ValueError, and ConfigError for a configuration.
    """
    file, config = environment.get(SEVERAL_RUNS), environment.get(ONE_RUN[0])
    if file is None:
        if config is None:
            if ONE_RUN[1] in environment:
                raise ValueError(f"{ONE_RUN[1]}: allowed: unset, because {ONE_RUN[0]} names no run")
            return {}
        run = ScheduledRun(config=config, schedule=environment.get(ONE_RUN[1], "0 * * * *"))
        return {CONTINUE_RUN: (run, load(Path(config)))}
    for variable in ONE_RUN:
        if variable in environment:
            raise ValueError(f"{variable}: allowed: unset, because {SEVERAL_RUNS} names a file with all runs")
    return load_schedules(Path(file))


def place_of_schedule(environment: Mapping[str, str], name: str) -> str:
    """Where the schedule of the launch plan of this name stands."""
    file = environment.get(SEVERAL_RUNS)
    return ONE_RUN[1] if file is None else f"{file}: {name}.schedule"


def load_schedules(path: Path) -> dict[str, tuple[ScheduledRun, RunConfig]]:
    """The scheduled runs of a file by the names of their launch plans, with their configurations.

    Raises ValueError, and ConfigError for a configuration. Two plans of one run would wait for each other's lease at
    every tick, so they are refused.
    """
    try:
        document = read_document(path)
    except DocumentError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(document, Mapping) or not document:
        raise ValueError(f"{path}: allowed: a mapping from names of launch plans to scheduled runs")
    if unfit := list(not_json(document)):
        raise ValueError(f"{path}: {'; '.join(unfit)}")
    found: dict[str, tuple[ScheduledRun, RunConfig]] = {}
    plan_of: dict[str, str] = {}
    for name, described in document.items():
        if not PLAN_NAME.fullmatch(name):
            allowed = "letters, digits, '_' and '-', a letter first, up to 63"
            raise ValueError(f"{path}: {name!r} given; allowed: {allowed}")
        try:
            run = _ADAPTER.validate_json(json.dumps(described))
        except ValidationError as error:
            lines = [f"{name}.{line}" for line in problems(error.errors(include_url=False), ScheduledRun)]
            raise ValueError(f"{path}: {'; '.join(lines)}") from None
        settings = load(path.parent / run.config)
        url = settings.run.url
        if (other := plan_of.setdefault(url.rstrip("/"), name)) != name:
            raise ValueError(f"{path}: {name}.config: the run {url} is that of {other!r}")
        found[name] = run, settings
    return found
