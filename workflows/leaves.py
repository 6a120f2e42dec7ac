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
    """A map of one element that succeeds however the element ends; locally, the element runs in this process."""

    def _raw_execute(self, **inputs: Any) -> list[Any]:
        [name] = inputs.keys() - self.bound_inputs
        return [self._element({**inputs, name: value}) for value in inputs[name]]

    def _element(self, inputs: dict[str, Any]) -> Any:
        try:
            return attempted(self.python_function_task.execute, self.local_retries, **inputs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the nodes that follow do not need it
            log.warning("%s failed, and training goes on without it: %s", self.title, error)
            return None


def leaf(task: Any, bound: dict[str, Any], pools: PoolsConfig, pool: str, settings: dict[str, Any]) -> Any:
    """Returns a function that wires the task as a leaf on the pool.

    The function takes the one unbound input as a list of one element or none; without an element no pod starts.
    """
    of_it = pools.named(pool)
    mapped = _mapped(task, frozenset(bound), of_it.pod_template or "")
    # Read when the node is wired, as the metadata of any task is.
    mapped.local_retries, mapped.title = of_it.retries, settings["name"]
    return functools.partial(mapped, **bound)


@functools.cache
def _mapped(task: Any, bound: frozenset[str], pod_template: str) -> Any:
    """One task for all leaves of a kind: Flyte stores each task of a dynamic workflow."""
    mapped = Leaf(task, concurrency=0, min_success_ratio=0.0, bound_inputs=set(bound))
    mapped.stands, mapped.imports = False, ()
    if pod_template:
        mapped.build_on(pod_template)
    return mapped
