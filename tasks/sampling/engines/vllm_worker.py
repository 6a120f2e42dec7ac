"""The extension of vLLM's workers: they load weights from our file, and end when the process that started vLLM ends.

vLLM finds the class by its name and calls it in every worker. All workers of an engine share a machine and the file.
"""

import os
import select
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tasks.sampling.engines.vllm_adapter import adapter_request, check_loaded
from tasks.sampling.engines.vllm_settings import OWNER


class WorkerExtension:
    """A mixin of vLLM's worker class."""

    # vLLM's worker has these.
    reload_weights: Any
    add_lora: Any
    model_runner: Any

    def gleaner_load_weights(self, path: str) -> float:
        """Replace all weights by those of a safetensors file, or the adapter by that of a folder; returns the seconds.

        With new weights vLLM forgets the adapter. The file has tied parameters under every name: vLLM's CPU build keeps
        a packed copy of the head, and renews it only from the head's own name.
        """
        began_s = time.perf_counter()
        if Path(path).is_dir():
            self.add_lora(adapter_request(path, replace=True))
            check_loaded(self.model_runner.lora_manager._adapter_manager)  # noqa: SLF001 - vLLM offers no other way
            return time.perf_counter() - began_s
        with safe_open(path, framework="pt") as file:
            self.reload_weights(weights_iterator=((name, file.get_tensor(name)) for name in file.keys()))  # noqa: SIM118
        return time.perf_counter() - began_s


def end_with_owner(owner: int) -> None:
    """Kill this process and its parent as soon as process `owner` ends, and this process also when its parent ends.

    Otherwise vLLM would run for ever after the process that started it is killed, and would keep the GPU's memory.
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


# At import, not at the first call, because loading the model before that takes minutes.
if OWNER in os.environ:
    end_with_owner(int(os.environ[OWNER]))
