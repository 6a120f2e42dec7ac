"""The export task: what other workflows take of a training, the policy as a directory and the iterations' outcomes."""

from pathlib import Path

from flytekit import current_context, task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory

from resources.pools import ControlPoolConfig, task_settings
from storage.clock import SystemClock
from storage.stores.connect import connect
from storage.stores.store import StoreUnavailable
from tasks.configuration.references import IterationOutcome
from tasks.task_log import logged_task

DEFAULT_POOL = ControlPoolConfig()


@task(**task_settings(DEFAULT_POOL))
def export_policy(
    concluded: IterationOutcome, count: int, dtype: str, code: str = ""
) -> tuple[FlyteDirectory, list[IterationOutcome]]:
    """Write the policy after an iteration as a Hugging Face model directory, which Flyte stores.

    Returns the directory, which a task downloads when it opens it, and the outcomes of the last iterations. The model
    must fit into the memory of pools.control.

    Args:
        concluded: the last iteration
        count: of how many iterations outcomes are returned
        dtype: float32, bfloat16 or float16; "stored" converts nothing
        code: as of `plan`
    """
    from tasks.concluding.iteration_outcomes import outcomes  # noqa: PLC0415 - when the task runs
    from tasks.reporting.export_model import export_model  # noqa: PLC0415

    version = concluded.weight_version
    folder = Path(current_context().working_directory) / f"policy-{version}"
    with logged_task(f"run {concluded.run_url}", None, f"export of weight version {version}", code=code) as log:
        try:
            done = export_model(connect(concluded.run_url), folder, SystemClock(), version=version, dtype=dtype)
            reports = outcomes(concluded, count)
        except StoreUnavailable as error:
            raise FlyteRecoverableException(str(error)) from error
        if log is not None:
            log.end(f"exported {done.num_bytes:,} bytes of {done.dtype}")
    return FlyteDirectory(str(folder)), reports
