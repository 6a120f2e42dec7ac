"""A process that joins late: its time from start to first token, part by part.

The parent starts it as `python -m benchmarks.late_joiner` and reads one JSON line. There are no claims or journals,
because it measures only what comes before a member can decode.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = ("python and imports", "model files and engine", "pull", "load into the engine", "prefill and first token")


def join(run_url: str, version: int, cache: Path, started_at_s: float) -> dict[str, float]:
    """Seconds of each part, in this process."""
    from storage.clock import SystemClock  # noqa: PLC0415
    from storage.records import model_files  # noqa: PLC0415 - imports are part of what is measured
    from storage.records.records import SamplingParams  # noqa: PLC0415
    from storage.stores.connect import connect  # noqa: PLC0415
    from storage.weights.cache import open_cache  # noqa: PLC0415
    from storage.weights.versions import pull_version  # noqa: PLC0415
    from tasks.sampling.engines.engine import GenerationRequest  # noqa: PLC0415
    from tasks.sampling.engines.torch_engine import TorchEngine  # noqa: PLC0415

    clock = SystemClock()
    marks = [started_at_s, clock.wall()]
    store = connect(run_url)
    with tempfile.TemporaryDirectory() as folder:
        model_files.download(store, Path(folder))
        engine = TorchEngine(folder, max_responses_in_flight=4, context_length=128)
    marks.append(clock.wall())
    _, tensors = pull_version(store, version, open_cache(str(cache), 1 << 36), clock)
    marks.append(clock.wall())
    engine.load_weights(version, tensors)
    marks.append(clock.wall())
    engine.start([GenerationRequest(0, 0, tuple(range(4, 36)), (), 1, SamplingParams(max_completion_length=8))])
    while not engine.step():
        continue
    marks.append(clock.wall())
    return {part: end - start for part, start, end in zip(PARTS, marks, marks[1:], strict=False)}


def joined(run_url: str, version: int, cache: Path) -> dict[str, float]:
    """Run `join` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.late_joiner", run_url, str(version), str(cache), str(time.time())]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    parts: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return parts


if __name__ == "__main__":
    url, number, directory, started = sys.argv[1:]
    print(json.dumps(join(url, int(number), Path(directory), float(started))))
