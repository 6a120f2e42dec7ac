"""What the command of a pod of Flyte 2 does with a task, without a backend to ask: the process of a test.

It takes the name of a task in tests/flyte2_tasks.py, its inputs as JSON, and the folder for what the task leaves.
"""

import asyncio
import json
import sys
from pathlib import Path

from flyte._internal.runtime.convert import convert_from_native_to_inputs
from flyte._internal.runtime.taskrunner import extract_download_run_upload
from flyte.models import ActionID, CheckpointPaths, RawDataPath

from tests import flyte2_tasks


async def run(name: str, inputs: str, folder: Path) -> None:
    task = getattr(flyte2_tasks, name)
    given = await convert_from_native_to_inputs(task.native_interface, **json.loads(inputs))
    (folder / "inputs.pb").write_bytes(given.proto_inputs.SerializeToString())
    await extract_download_run_upload(
        task,
        action=ActionID(name="action", run_name="run-1", project="p", domain="d", org="o"),
        controller=None,
        raw_data_path=RawDataPath(path=str(folder)),
        output_path=str(folder),
        run_base_dir=str(folder),
        version="1",
        checkpoint_paths=CheckpointPaths(str(folder), str(folder)),
        input_path=str(folder / "inputs.pb"),
    )


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
