"""The regrade task: gives stored responses of a run other rewards, beside the run's own, and compares both."""

from flytekit import Deck, task
from flytekit.exceptions.user import FlyteRecoverableException

from resources.ending import ends_on_notice
from resources.pools import ControlPoolConfig, task_settings
from resources.visible_text import markup
from storage.stores.store import StoreUnavailable
from tasks.configuration.run_config import parse
from tasks.plan import forgo_models_in_a_container
from tasks.regrading.reward_change import RewardChange, change_text
from tasks.task_log import check_code, logged_task

DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL), enable_deck=True, deck_fields=())
def regrade(config: dict, grading: str, iterations: str, code: str = "") -> RewardChange:  # type: ignore[type-arg]
    """Grade committed iterations with the rewards of `config`; returns the comparison, which the Deck shows.

    A further attempt goes on behind the last iteration that the grading has; an iteration is graded whole.

    Args:
        config: the configuration with the rewards; its run.url is the run
        grading: the name of the grading
        iterations: a:b (without b), a:, :b, : or a
        code: as of `plan`
    """
    from tasks.reporting.deck import styled  # noqa: PLC0415 - when the task runs

    forgo_models_in_a_container()
    check_code("regrade", code)
    change = _compared(config, grading, iterations)
    Deck("Grading", styled([f"<pre>{markup(change_text(change))}</pre>"]))
    return change


@ends_on_notice()
def _compared(config: dict, grading: str, iterations: str) -> RewardChange:  # type: ignore[type-arg]
    """The comparison; ends at SIGTERM, and raises FlyteRecoverableException if another attempt may help."""
    from storage.records.run import connect_to_run  # noqa: PLC0415 - when the task runs
    from tasks.regrading.regrading import regrade_and_compare  # noqa: PLC0415
    from tasks.reporting.progress import progress  # noqa: PLC0415

    settings = parse(config)
    with logged_task(f"run {settings.run.url}", None, f"grading {grading}") as log:
        try:
            with progress() as shown:
                store = connect_to_run(settings.run.url)
                graded, change = regrade_and_compare(store, settings, iterations, grading, shown.tell)
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
        if log is not None:
            log.tell(f"graded {len(graded)} of {len(change.iterations)} iterations in this attempt")
    return change
