"""Cron schedules of launch plans, and the policy by which a tick is skipped while an execution of the plan runs."""

from flytekit import ConcurrencyLimitBehavior, ConcurrencyPolicy, CronSchedule


def cron(what: str, schedule: str) -> CronSchedule:
    """A schedule from a cron expression of five fields, or @daily etc.; raises ValueError that names `what`.

    flytekit would accept a sixth field, and flyteadmin would read it as a different schedule.
    """
    if not schedule.startswith("@") and len(schedule.split()) != 5:
        raise ValueError(f"{what}: {schedule!r} given; allowed: a cron expression of five fields, or @daily etc.")
    return CronSchedule(schedule=schedule)


def one_at_a_time() -> ConcurrencyPolicy:
    """Skip a tick while an execution of the plan runs. flyteadmin checks first and creates then, so two may start."""
    return ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP)
