"""Warm-up: requests like a run's own, at the end of vLLM's start, so that no response waits for a kernel's compilation.

vLLM warms up its own sampling. Our noise, log-probs and their numbers of rows have kernels besides, which would be
compiled in the first steps of the first responses. The weights are random then and still being pulled.
"""

import time
from collections.abc import Callable, Sequence

from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.vllm_core import Core, CoreRequest

# Triton compiles a kernel once for a number of 1, once for multiples of 16 and once for other numbers.
ROWS = (1, 2, 16)


def warm_up(core: Core, requests: Callable[[int], Sequence[CoreRequest]], rows_max: int, limit_s: float) -> float:
    """Decode as many requests together as each of ROWS says; returns the seconds taken.

    Args:
        core: vLLM, as it has started.
        requests: returns the given number of requests, with new names each time.
        rows_max: the most requests that vLLM decodes together.
        limit_s: the most seconds without an output.

    Raises:
        EngineDied: vLLM fails or sends nothing.
    """
    began_s = time.monotonic()
    for rows in ROWS:
        if rows <= rows_max:
            _decode(core, requests(rows), limit_s)
    return time.monotonic() - began_s


def _decode(core: Core, requests: Sequence[CoreRequest], limit_s: float) -> None:
    core.start(requests)
    left = {request.name for request in requests}
    last_s = time.monotonic()
    while left:
        outputs = core.outputs()
        left -= {output.request_id for output in outputs if output.finished}
        if outputs:
            last_s = time.monotonic()
        elif time.monotonic() - last_s > limit_s:
            raise EngineDied(f"vLLM has sent no token for {limit_s:g} s while it warmed up")
