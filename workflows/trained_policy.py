"""Training for other workflows: its outputs are the policy as a directory, and the iterations' outcomes as a list."""

from typing import Any, NamedTuple

from flytekit import dynamic, workflow
from flytekit.types.directory import FlyteDirectory

from resources.package_code import code_digest
from resources.pools import ControlPoolConfig, task_settings
from tasks.configuration.references import IterationOutcome
from tasks.configuration.run_config import parse
from tasks.export_policy import export_policy
from tasks.task_log import check_code, logged_wiring
from workflows.config_input import Configuration
from workflows.count import Count
from workflows.iteration import settings_on
from workflows.local_attempts import built_on
from workflows.node_names import NodeNames
from workflows.training import iterations


class TrainedPolicy(NamedTuple):
    """The outputs.

    Attributes:
        policy: a Hugging Face model directory, downloaded when it is opened.
        reports: the outcomes of the added iterations, in order.
        outcome: the last of them.
    """

    policy: FlyteDirectory
    reports: list[IterationOutcome]
    outcome: IterationOutcome


@dynamic(**task_settings(ControlPoolConfig()))
def exported(
    config: dict,  # type: ignore[type-arg]
    concluded: IterationOutcome,
    count: Count,
    dtype: str,
    code: str = "",
) -> tuple[FlyteDirectory, list[IterationOutcome]]:
    """Export the policy after an iteration, on the control pool of the configuration; inputs as of `export_policy`."""
    check_code("exported", code)
    settings = parse(config)
    with logged_wiring(f"run {settings.run.url}", "the export of the policy"):
        task = built_on(export_policy, settings.pools, "control")
        made: Any = task(concluded=concluded, count=int(count), dtype=dtype, code=code)
        names = NodeNames(run=settings.run.url)
        policy, reports = made.with_overrides(**settings_on(settings.pools, "control", names, "export"))
    return policy, reports


@workflow
def trained_policy(
    config: Configuration = {},  # type: ignore[assignment]  # noqa: B006
    count: Count = Count(1),  # noqa: B008
    dtype: str = "stored",
) -> TrainedPolicy:
    """Train as the workflow `training` does, then export the policy for a workflow that evaluates or deploys it.

    Args:
        config: the run's configuration, a YAML or JSON file, or a list of a file and fields to change
        count: how many iterations to add
        dtype: of the exported policy: float32, bfloat16 or float16; stored converts nothing
    """
    code = code_digest()
    outcome: IterationOutcome = iterations(config=config, count=count, code=code)
    policy, reports = exported(config=config, concluded=outcome, count=count, dtype=dtype, code=code)
    return TrainedPolicy(policy=policy, reports=reports, outcome=outcome)
