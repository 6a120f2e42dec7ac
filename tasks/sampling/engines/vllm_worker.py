"""What we add to the workers of vLLM, which hold the weights: loading from a file of ours, and not outliving us.

vLLM finds the class by its name and calls it in every worker; the file is on the machine that all of them share.
"""

import os
import select
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from safetensors import safe_open

from tasks.sampling.engines.vllm_settings import OWNER


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


def end_with_owner(owner: int) -> None:
    """Kill this process, and vLLM's between, as soon as process `owner` has ended; and this one when that one has.

    By itself vLLM goes on for ever when the process that started it is killed, and keeps the GPU's memory.
    """
    if os.getpid() != owner:
        watched = {owner, os.getppid()}
        threading.Thread(target=_kill_after_any, args=(watched, owner), name="gleaner-owner", daemon=True).start()


def _kill_after_any(watched: set[int], owner: int) -> None:
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid) for pid in watched], [], [])
    for pid in watched - {owner}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


# Now, and not when we are called: the model that is loaded first takes minutes.
if OWNER in os.environ:
    end_with_owner(int(os.environ[OWNER]))
