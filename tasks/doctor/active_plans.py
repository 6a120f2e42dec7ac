"""Whether the launch plans whose schedules are on are those of the files.

Flyte keeps what was registered first: registering again under a version that is taken changes nothing, and gives no
error. A plan that the files no longer have stays on.
"""

from collections.abc import Iterator, Mapping

from storage.stores.fitness import Finding
from tasks.configuration.run_config import ConfigError, RunConfig, differences, dump, parse, settings_digest
from tasks.configuration.schedules import ScheduledRun
from tasks.doctor.cluster import WORKFLOW, Admin, ClusterDemand, ClusterTarget, Plan

AGAIN = "register again, under another version"
_DIFFERENCES_SHOWN = 3


def plan_findings(admin: Admin, place: ClusterTarget, asked: ClusterDemand) -> Iterator[Finding]:
    """One finding for each plan that is on, and for each that shall be."""
    active = admin.active_plans(place.project, place.domain, WORKFLOW)
    for plan in active:
        yield Finding(_name(plan.name), _shown(plan), _lack(plan, place, asked))
    for name in sorted((asked.scheduled or {}).keys() - {plan.name for plan in active}):
        yield Finding(_name(name), "", "not on: register it with --activate-launchplans")


def _name(plan: str) -> str:
    return f"launch plan {plan}"


def _shown(plan: Plan) -> str:
    iterations = f"{plan.inputs['count']} iterations of {_run_of(plan) or 'no run'}"
    return (
        f"version {plan.version}, at {plan.schedule} (UTC): {iterations}, settings {plan.settings_digest or 'unknown'}"
    )


def _lack(plan: Plan, place: ClusterTarget, asked: ClusterDemand) -> str | None:
    if asked.scheduled is None:
        is_its_run = asked.settings is not None and _run_of(plan) == asked.settings.run.url.rstrip("/")
        return _other_settings(plan, asked.settings) if is_its_run and asked.settings is not None else None
    if plan.name not in asked.scheduled:
        off = f"pyflyte launchplan -p {place.project} -d {place.domain} --deactivate {plan.name} {plan.version}"
        return f"on, though it is none of {', '.join(sorted(asked.scheduled))}: its ticks go on; end them with {off}"
    run, settings = asked.scheduled[plan.name]
    return _other_settings(plan, settings) or _other_schedule(plan, run)


def _run_of(plan: Plan) -> str:
    run = plan.inputs["config"].get("run")
    return str(run.get("url", "")).rstrip("/") if isinstance(run, Mapping) else ""


def _other_settings(plan: Plan, settings: RunConfig) -> str | None:
    """What differs, unless it is only that a newer Gleaner has more fields, whose defaults hold."""
    if plan.settings_digest == settings_digest(settings):
        return None
    try:
        registered = dump(parse(plan.inputs["config"], held=True))
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
