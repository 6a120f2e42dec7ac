"""Pools: kinds of machines as values, and their translation into Flyte's settings.

A pool is either interruptible (spot: cheap, may vanish) or reserved. In this package only this file and pod_template.py
import flytekit, and only when a task is declared or a node is built.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from resources.images import checked_image
from resources.placement import TolerationConfig, check_label, check_label_value, is_spot_label
from resources.prices import machine_price, request_prices

if TYPE_CHECKING:
    from flytekit import PodTemplate

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
POOL_NAME = r"^[a-z][a-z0-9_-]{0,39}$"
# Reports and plans use these names for other machines.
RESERVED_NAMES = frozenset({"rollout", "train", "control", "joined"})
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti|k|M|G|T)?$"


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """One kind of machine.

    machine: its name in the price table; usd_per_hour overrides the table.
    count: how many slots an iteration starts on it. concurrency: how many run at once (0: all).
    cpu, memory, gpus, accelerator, shared_memory: what a slot requests and is limited to.
    retries: attempts after a failure of our own; Flyte retries a lost machine from a budget of its own.
    grace_s: seconds between the notice (SIGTERM) and the kill, as requested from Kubernetes.
    node_selector, tolerations: passed to the pod; an interruptible pool must not select spot machines by label.
    """

    __pydantic_config__ = STRICT
    machine: str = "g6.xlarge"
    interruptible: bool = False
    count: Annotated[int, Field(ge=1, le=10_000)] = 1
    concurrency: Annotated[int, Field(ge=0)] = 0
    cpu: Annotated[str, Field(pattern=QUANTITY)] = "3"
    memory: Annotated[str, Field(pattern=QUANTITY)] = "12Gi"
    gpus: Annotated[int, Field(ge=0, le=16)] = 0
    accelerator: str | None = None
    shared_memory: bool = True
    retries: Annotated[int, Field(ge=0, le=100)] = 3
    grace_s: Annotated[int, Field(ge=1, le=3600)] = 60
    image: str | None = None
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[TolerationConfig, ...] = ()
    usd_per_hour: Annotated[float, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.image is not None:
            checked_image(self.image)
        if self.accelerator is not None:
            check_label_value("accelerator", self.accelerator)
        for label, value in self.node_selector.items():
            check_label("node_selector", label)
            check_label_value(f"node_selector.{label}", value)
            if self.interruptible and is_spot_label(label, value):
                raise ValueError(
                    f"node_selector.{label}: value {value!r}; allowed with interruptible true: no label of spot "
                    "machines, because Flyte's last attempt runs on a reserved machine, which does not have it"
                )

    @property
    def price_usd_per_h(self) -> float:
        """Dollars per hour of a slot: its share of the machine by GPUs. Raises LookupError for an unknown machine."""
        if self.usd_per_hour is not None:
            return self.usd_per_hour
        price = machine_price(self.machine)
        if 0 < self.gpus < price.gpus:
            return self.gpus * price.usd_per_gpu_h(self.interruptible)
        return price.usd_per_h(self.interruptible)


@dataclass(frozen=True, kw_only=True)
class RolloutPoolConfig(PoolConfig):
    """A pool of the crew: two interruptible machines by default.

    count: 0 leaves the pool out of training's iterations. count_min: the fewest slots that an iteration may be planned
        with when the planner chooses the width.
    egress_usd_per_gb: price of reading the run's store, if it is in another region or cloud.
    """

    __pydantic_config__ = STRICT
    interruptible: bool = True
    count: Annotated[int, Field(ge=0, le=10_000)] = 2
    count_min: Annotated[int, Field(ge=0, le=10_000)] = 1
    egress_usd_per_gb: Annotated[float, Field(ge=0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count_min > self.count:
            raise ValueError(f"count_min: {self.count_min} given; allowed: 0 to count ({self.count})")


@dataclass(frozen=True, kw_only=True)
class ControlPoolConfig(PoolConfig):
    """The machine of plan and conclude: small and reserved."""

    __pydantic_config__ = STRICT
    cpu: Annotated[str, Field(pattern=QUANTITY)] = "1"
    memory: Annotated[str, Field(pattern=QUANTITY)] = "4Gi"
    usd_per_hour: Annotated[float, Field(ge=0)] | None = 0.0


@dataclass(frozen=True, kw_only=True)
class PoolsConfig:
    """rollout: a pool of the crew; train: the reserved machine of the trainer; control: plan and conclude.

    more_rollout: further pools of the crew by name: other kinds of machines, other regions, reserved ones.
    """

    __pydantic_config__ = STRICT
    rollout: RolloutPoolConfig = field(default_factory=RolloutPoolConfig)
    more_rollout: dict[Annotated[str, Field(pattern=POOL_NAME)], RolloutPoolConfig] = field(default_factory=dict)
    train: PoolConfig = field(default_factory=PoolConfig)
    control: ControlPoolConfig = field(default_factory=ControlPoolConfig)

    def __post_init__(self) -> None:
        if self.train.interruptible:
            raise ValueError("train.interruptible: true given; allowed: false, the trainer runs on reserved machines")
        if self.train.count != 1:
            raise ValueError(f"train.count: {self.train.count} given; allowed: 1")
        # Flyte's node ids allow no underscores.
        names = [name.replace("_", "-") for name in self.more_rollout]
        alike = sorted(name for name in set(names) if names.count(name) > 1)
        if alike:
            raise ValueError(f"more_rollout: two pools are called {alike[0]!r} where _ is -; allowed: different names")
        taken = sorted(RESERVED_NAMES & set(self.more_rollout))
        if taken:
            raise ValueError(f"more_rollout: {taken[0]!r} given; allowed: other names than {sorted(RESERVED_NAMES)}")

    @property
    def rollout_pools(self) -> dict[str, RolloutPoolConfig]:
        """The pools of the crew by name, `rollout` first."""
        return {"rollout": self.rollout, **self.more_rollout}

    @property
    def standing_slots(self) -> dict[str, list[int]]:
        """The slots of a standing crew by pool, as a plan of fixed width numbers them: pool by pool."""
        first, slots = 0, {}
        for name, pool in self.rollout_pools.items():
            slots[name] = list(range(first, first + pool.count))
            first += pool.count
        return slots

    def check_prices(self) -> None:
        """Raise LookupError or PricesError now rather than when the iteration is concluded."""
        for pool in (*self.rollout_pools.values(), self.train, self.control):
            _ = pool.price_usd_per_h
        request_prices()


def pool_path(name: str) -> str:
    """The path of a pool's section in the configuration."""
    return f"pools.{name}" if name in RESERVED_NAMES else f"pools.more_rollout.{name}"


def overrides(pool: PoolConfig) -> dict[str, Any]:
    """Arguments for a Flyte node's `with_overrides`: requests and limits together, so neither clamps the other."""
    from flytekit import Resources  # noqa: PLC0415 - flytekit costs a second; pure users of pools must not pay it
    from flytekit.extras.accelerators import GPUAccelerator  # noqa: PLC0415

    ask = Resources(cpu=pool.cpu, mem=pool.memory, gpu=str(pool.gpus) if pool.gpus else None)
    chosen: dict[str, Any] = {
        "requests": ask,
        "limits": ask,
        "interruptible": pool.interruptible,
        "retries": pool.retries,
        "pod_template": pod_template(pool),
    }
    if pool.shared_memory:
        chosen["shared_memory"] = True
    if pool.accelerator is not None:
        chosen["accelerator"] = GPUAccelerator(pool.accelerator)
    if pool.image is not None:
        chosen["container_image"] = pool.image
    return chosen


def task_settings(pool: PoolConfig) -> dict[str, Any]:
    """Arguments for `@task` or `@dynamic` of a task that runs on `pool` by default; the same as a node's overrides.

    They serve tasks that are declared before a configuration is known, or run without a configuration's overrides. A
    task that requests nothing would get the platform's default, 200 MiB on Flyte's own.
    """
    return overrides(pool)


def pod_template(pool: PoolConfig) -> "PodTemplate":
    """The pod's grace period, placement and tolerations, for which Flyte has no arguments."""
    from resources.pod_template import PoolPodTemplate  # noqa: PLC0415 - as flytekit

    return PoolPodTemplate(pool.grace_s, pool.node_selector, [toleration.given() for toleration in pool.tolerations])
