"""Leaves of an execution: tasks on which nothing that carries a run on depends, and whose end must not end it.

Flyte ends an execution with the first node that fails for good, and a container that is killed for memory cannot catch
that. A map of one that asks for no success cannot fail: its output is then None.
"""

import functools
import logging
from typing import Any

from resources.pools import PoolsConfig
from tasks.local_map import CrewMapTask
from workflows.local_attempts import attempted

log = logging.getLogger(__name__)


class Leaf(CrewMapTask):
    """A map of one that succeeds however its element ends; on one machine the element runs in this process."""

    def _raw_execute(self, **inputs: Any) -> list[Any]:
        [name] = inputs.keys() - self.bound_inputs
        return [self._element({**inputs, name: value}) for value in inputs[name]]

    def _element(self, inputs: dict[str, Any]) -> Any:
        try:
            return attempted(self.python_function_task.execute, self.local_retries, **inputs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the nodes that follow do not need it
            log.warning("%s failed, and training goes on without it: %s", self.title, error)
            return None


def leaf(target: "functools.partial[Any]", pools: PoolsConfig, pool: str, settings: dict[str, Any]) -> Leaf:
    """A leaf on the pool of this name. target: the task, with all inputs but the one that is given as a list.

    The list has one element, or none: then no pod starts.
    """
    of_it = pools.named(pool)
    mapped = Leaf(target, concurrency=1, min_success_ratio=0.0)
    mapped.local_retries, mapped.title, mapped.stands = of_it.retries, settings["name"], False
    mapped.imports = ()
    if of_it.pod_template:
        mapped.build_on(of_it.pod_template)
    return mapped
