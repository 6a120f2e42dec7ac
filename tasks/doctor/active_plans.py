"""Compares the launch plans with active schedules with the plans in the user's files.

Flyte keeps the first registration: registering again under a used version changes nothing, and gives no error. A plan
removed from the files stays active.
"""

from collections.abc import Iterator, Mapping

from storage.records.fitness import Finding
from tasks.configuration.run_config import ConfigError, RunConfig, differences, dump, parse_held, settings_digest
from tasks.configuration.schedules import ScheduledRun
from tasks.doctor.cluster import WORKFLOW, Admin, ClusterDemand, ClusterTarget, Plan

AGAIN = "register again, under another version"
_DIFFERENCES_SHOWN = 3


def plan_findings(admin: Admin, place: ClusterTarget, demand: ClusterDemand) -> Iterator[Finding]:
    """A finding for each active plan, and for each plan of the files that is not active."""
    active = admin.active_plans(place.project, place.domain, WORKFLOW)
    for plan in active:
        yield Finding(_name(plan.name), _shown(plan), _lack(plan, place, demand))
    for name in sorted((demand.scheduled or {}).keys() - {plan.name for plan in active}):
        yield Finding(_name(name), "", "not on: register it with --activate-launchplans")


def _name(plan: str) -> str:
    return f"launch plan {plan}"


def _shown(plan: Plan) -> str:
    iterations = f"{plan.inputs['count']} iterations of {_run_of(plan) or 'no run'}"
    return (
        f"version {plan.version}, at {plan.schedule} (UTC): {iterations}, settings {plan.settings_digest or 'unknown'}"
    )


def _lack(plan: Plan, place: ClusterTarget, demand: ClusterDemand) -> str | None:
    if demand.scheduled is None:
        is_its_run = demand.settings is not None and _run_of(plan) == demand.settings.run.url.rstrip("/")
        return _other_settings(plan, demand.settings) if is_its_run and demand.settings is not None else None
    if plan.name not in demand.scheduled:
        off = f"pyflyte launchplan -p {place.project} -d {place.domain} --deactivate {plan.name} {plan.version}"
        return f"on, though it is none of {', '.join(sorted(demand.scheduled))}: its ticks go on; end them with {off}"
    run, settings = demand.scheduled[plan.name]
    return _other_settings(plan, settings) or _other_schedule(plan, run)


def _run_of(plan: Plan) -> str:
    run = plan.inputs["config"].get("run")
    return str(run.get("url", "")).rstrip("/") if isinstance(run, Mapping) else ""


def _other_settings(plan: Plan, settings: RunConfig) -> str | None:
    """The settings that differ, in words; None for equal settings. Fields of a newer Gleaner count by the defaults."""
    if plan.settings_digest == settings_digest(settings):
        return None
    try:
        registered = dump(parse_held(plan.inputs["config"]))
    except ConfigError as error:
        return f"version {plan.version} has settings that this Gleaner refuses: {' '.join(str(error).split())}; {AGAIN}"
    found = differences(dump(settings), registered)
    if not found:
        return None
    more = f" and {len(found) - _DIFFERENCES_SHOWN} more" if len(found) > _DIFFERENCES_SHOWN else ""
    return f"version {plan.version} has other settings: {'; '.join(found[:_DIFFERENCES_SHOWN])}{more}; {AGAIN}"


def _other_schedule(plan: Plan, run: ScheduledRun) -> str | None:
    for what, here, there in (
        ("ticks", run.schedule, plan.schedule),
        ("iterations", run.iterations, plan.inputs["count"]),
    ):
        if here != there:
            return f"version {plan.version} has other {what}: {here} here, {there} there; {AGAIN}"
    return None
