"""Attempts of a node on one machine: as many as Flyte would give it on a cluster, after the same failures.

flytekit runs a node in the process of `pyflyte run` and gives it one attempt, so an outage of the store would end the
command. The members of a crew get their attempts from `tasks/local_map.py`.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import PoolsConfig

log = logging.getLogger(__name__)
# On a cluster a new pod takes as long to begin.
PAUSE_S, PAUSE_S_MAX = 5.0, 60.0


def built_on(task: Any, pools: PoolsConfig, pool: str, sleep: Callable[[float], None] = time.sleep) -> Any:
    """What wires the task, or runs it here, with the template and the attempts of the pool of this name.

    The PodTemplate, on which Flyte builds the pods, is a setting of tasks, not of nodes.
    """
    of_it = pools.named(pool)
    task.metadata.pod_template_name = of_it.pod_template or None
    return partial(attempted, task, of_it.retries, sleep)


def attempted(task: Any, retries: int, sleep: Callable[[float], None] = time.sleep, /, **inputs: Any) -> Any:
    """Call the task; after a failure for which Flyte would start it again, call it again, at most `retries` times."""
    for attempt in range(retries):
        try:
            return task(**inputs)
        except FlyteRecoverableException as error:
            pause_s = min(PAUSE_S_MAX, PAUSE_S * 2**attempt)
            log.warning(
                "attempt %d of %d failed; the next one begins in %.0f s: %s", attempt + 1, retries + 1, pause_s, error
            )
            sleep(pause_s)
    return task(**inputs)
