"""What we add to the workers of vLLM, which hold the weights: loading from a file of ours, and not outliving us.

vLLM finds the class by its name and calls it in every worker; the file is on the machine that all of them share.
"""

import os
import select
import signal
import threading
import time
from typing import Any

from safetensors import safe_open


class WorkerExtension:
    """Mixed into vLLM's worker class."""

    # of the worker
    reload_weights: Any

    def gleaner_load_weights(self, path: str) -> float:
        """Replace all weights by those of a safetensors file; seconds taken.

        The file names tied parameters under every name: vLLM's CPU build keeps a packed copy of the head, which is
        renewed by the head's own name only.
        """
        began_s = time.perf_counter()
        with safe_open(path, framework="pt") as file:
            self.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
        return time.perf_counter() - began_s

    def gleaner_end_with(self, owner: int) -> None:
        """Kill this process, and the engine's between, as soon as process `owner` has ended.

        By itself vLLM goes on for ever when the process that started it is killed, and keeps the GPU's memory.
        """
        between = os.getppid()
        if os.getpid() != owner:
            doomed = [os.getpid()] if between == owner else [between, os.getpid()]
            threading.Thread(target=_kill_after, args=(owner, doomed), name="gleaner-owner", daemon=True).start()


def _kill_after(owner: int, doomed: list[int]) -> None:
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        pass
    else:
        select.select([handle], [], [])
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
