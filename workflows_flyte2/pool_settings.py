"""Pools for Flyte 2: the settings of a task's call, from the same configuration as those of a node of flytekit."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import flyte

from resources.pools import SCORING, PoolConfig, PoolsConfig, pod_template, pool_path
from workflows.local_attempts import PAUSE_S, PAUSE_S_MAX
from workflows.node_names import NodeNames


def settings_on(pools: PoolsConfig, pool: str, names: NodeNames, what: str) -> dict[str, Any]:
    """Arguments for `override` of the task called `what`, which runs on a pool of this name; raises ValueError."""
    name = f"{SCORING}{pool}" if pool in pools.scoring else pool
    settings = overrides(name, pools.named(pool), {**names.labels(pool), **pools.labels})
    return {"short_name": names.of(what)["name"], **settings}


def overrides(name: str, pool: PoolConfig, labels: Mapping[str, str | None]) -> dict[str, Any]:
    """The same of a pool called `name`; requests are limits, as on Flyte 1.

    `retries` counts failures of ours; the platform counts the losses of machines apart. No time limit is set, as
    on Flyte 1. Raises ValueError for a PodTemplate by name: a task of Flyte 2 has a PodTemplate by
    name or by content, and labels, tolerations and the grace period are content.
    """
    if pool.pod_template:
        raise ValueError(
            f"{pool_path(name)}.pod_template: value {pool.pod_template!r}; allowed on Flyte 2: null; give labels, "
            "node_selector, tolerations and env in the pool itself"
        )
    gpu: Any = pool.gpus or None
    if gpu and pool.accelerator is not None:
        gpu = flyte.Device(quantity=pool.gpus, device_class="GPU", device=pool.accelerator)
    pause = flyte.Backoff(timedelta(seconds=PAUSE_S), factor=2.0, cap=timedelta(seconds=PAUSE_S_MAX))
    return {
        "resources": flyte.Resources(
            cpu=(pool.cpu, pool.cpu),
            memory=(pool.memory, pool.memory),
            gpu=gpu,
            shm="auto" if pool.shared_memory else None,
        ),
        "retries": flyte.RetryStrategy(pool.retries, pause),
        "interruptible": pool.interruptible,
        "cache": "disable",
        "pod_template": _template(pool, labels),
        "secrets": [flyte.Secret(each["key"], each["group"], as_env_var=each["env_var"]) for each in pool.secrets],
    }


def _template(pool: PoolConfig, labels: Mapping[str, str | None]) -> flyte.PodTemplate:
    # Flyte 2 asks for secrets in an argument of its own.
    made = pod_template(replace(pool, secrets=()), labels)
    spec = made.pod_spec
    # An image cannot be overridden, and that of the primary container has precedence.
    spec.containers[0].image = pool.image
    return flyte.PodTemplate(spec, made.primary_container_name, made.labels, made.annotations)
