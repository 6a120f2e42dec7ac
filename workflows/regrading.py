"""Regrading: a run's stored responses get other rewards, beside the run's own, on a machine of a pool."""

from flytekit import dynamic, workflow

from resources.package_code import code_digest
from resources.pools import ControlPoolConfig, task_settings
from tasks.configuration.run_config import parse
from tasks.regrade import regrade
from tasks.regrading.reward_change import RewardChange
from tasks.reporting.interruption import announced_interruption
from tasks.task_log import check_code, logged_wiring
from workflows.config_input import Configuration
from workflows.evaluation import grading_pool
from workflows.iteration import settings_on
from workflows.local_attempts import built_on
from workflows.node_names import NodeNames


@dynamic(**task_settings(ControlPoolConfig()))
def regrade_run(config: dict, grading: str, iterations: str, code: str = "") -> RewardChange:  # type: ignore[type-arg]
    """Grade on the pool that the rewards need; inputs as of the task `regrade`."""
    check_code("regrade_run", code)
    settings = parse(config)
    pools, pool = settings.pools, grading_pool(settings.rewards)
    of_node = settings_on(pools, pool, NodeNames(run=settings.run.url), "regrade")
    wired = logged_wiring(f"run {settings.run.url}", f"the grading {grading}")
    with wired, announced_interruption(settings.run.url):
        graded = built_on(regrade, pools, pool)(config=config, grading=grading, iterations=iterations, code=code)
        change: RewardChange = graded.with_overrides(**of_node)
    return change


@workflow
def regrading(config: Configuration, grading: str, iterations: str = ":") -> RewardChange:
    """Grade stored responses with the rewards of a configuration, as `gleaner regrade` does.

    Args:
        config: a YAML or JSON file with the rewards and the run.url of the graded run, or a list of a file and fields
            to change
        grading: the name of the grading
        iterations: a:b (without b), a:, :b, : or a, of the committed ones
    """
    change: RewardChange = regrade_run(config=config, grading=grading, iterations=iterations, code=code_digest())
    return change
