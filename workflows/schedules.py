"""What launch plans share: cron schedules, notifications, and the policy that skips a tick while an execution runs."""

from collections.abc import Iterator

from flytekit import ConcurrencyLimitBehavior, ConcurrencyPolicy, CronSchedule, Email, PagerDuty, Slack
from flytekit.core.notification import Notification
from flytekit.models.core.execution import WorkflowExecutionPhase

from tasks.configuration.schedules import NotifyConfig


def cron(what: str, schedule: str) -> CronSchedule:
    """A schedule from a cron expression of five fields, or @daily etc.; raises ValueError that names `what`.

    flytekit would accept a sixth field, and flyteadmin would read it as a different schedule.
    """
    if not schedule.startswith("@") and len(schedule.split()) != 5:
        raise ValueError(f"{what}: {schedule!r} given; allowed: a cron expression of five fields, or @daily etc.")
    return CronSchedule(schedule=schedule)


def one_at_a_time() -> ConcurrencyPolicy:
    """Skip a tick while an execution of the plan runs. flyteadmin checks, then creates: two may start together."""
    return ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP)


def notifications(notify: NotifyConfig) -> Iterator[Notification]:
    """Flyte's notifications: one for each kind of address in `notify`."""
    phases = [getattr(WorkflowExecutionPhase, phase.upper()) for phase in notify.phases]
    for kind, addresses in ((Email, notify.email), (Slack, notify.slack), (PagerDuty, notify.pager_duty)):
        if addresses:
            yield kind(phases=phases, recipients_email=list(addresses))
