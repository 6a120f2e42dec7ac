"""Runs under Flyte 2 on this machine, for tests where its SDK is installed."""

from pathlib import Path
from typing import Any

import yaml


def run_local(task: Any, config: Path, folder: Path, **inputs: Any) -> Any:
    """What `flyte run --local` returns for a task and a configuration; what it stores lies below `folder`."""
    import flyte  # noqa: PLC0415 - not in every environment

    flyte.init()
    run = flyte.with_runcontext(mode="local", raw_data_path=str(folder / "raw")).run(
        task, config=yaml.safe_load(config.read_text()), **inputs
    )
    return run.outputs()[0]
