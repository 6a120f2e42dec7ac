"""Runs under Flyte 2 on this machine, for tests where its SDK is installed."""

from pathlib import Path
from typing import Any

import yaml


def run_local(task: Any, config: Path, **inputs: Any) -> Any:
    """What a task returns for a configuration."""
    return local_run(task, yaml.safe_load(config.read_text()), **inputs).outputs()[0]


def local_run(task: Any, config: dict[str, Any], **inputs: Any) -> Any:
    """The run that `flyte run --local` makes; its `url` is the folder of what its tasks leave behind."""
    import flyte  # noqa: PLC0415 - not in every environment

    flyte.init()
    return flyte.with_runcontext(mode="local").run(task, config=config, **inputs)
