"""Pools: kinds of machines as values, and their translation into Flyte's settings.

A pool is either interruptible (spot: cheap, may vanish) or reserved. In this package this file and pod_template.py
import flytekit when a task is declared or a node is built, and flyte_admin.py does to read.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from resources.kubernetes_fields import (
    check_env,
    check_secrets,
    check_subdomain,
    check_tolerations,
    refuse,
)
from resources.labels import COST_LABELS, check_label_value, check_labels, is_spot_label
from resources.prices import UnknownMachine, machine_price, price_table
from resources.quantities import quantity_text

if TYPE_CHECKING:
    from flytekit import PodTemplate

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
# It is the value of a label, too, which ends with a letter or digit.
POOL_NAME = r"^[a-z]([a-z0-9_-]{0,38}[a-z0-9])?$"
# Reports and plans use these names for other machines.
RESERVED_NAMES = frozenset({"rollout", "train", "control", "joined"})
# Begins the name of a pool of scorers where the names of all pools stand together.
SCORING = "scoring."
# An image: [registry[:port]/]name[/name...] and :tag or @digest, as in the OCI distribution specification.
_IMAGE = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})"
)
Quantity = Annotated[str, BeforeValidator(quantity_text)]
# Values of a type that JSON gives; kubernetes_fields.py checks what is in them.
Labels = dict[str, str | None]
Items = tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """One kind of machine. Fields not listed are a pod's own, in the words of Kubernetes.

    An interruptible pool must not select spot machines.

    Attributes:
        machine: name of the machine in the price table; `usd_per_hour` overrides the table.
        count: number of slots that an iteration starts on the pool.
        concurrency: number of slots that run at once; 0: all.
        cpu, memory, gpus, accelerator: request and limit of a slot.
        retries: attempts after a failure of our own; Flyte retries a lost machine from a budget of its own.
        grace_s: seconds between the notice (SIGTERM) and the kill, as requested from Kubernetes.
        pod_template: name of a PodTemplate in the cluster, on which Flyte builds the pod.
        secrets: secrets that Flyte manages, as variables.
    """

    __pydantic_config__ = STRICT
    machine: str = "g6.xlarge"
    interruptible: bool = False
    count: Annotated[int, Field(ge=1, le=10_000)] = 1
    concurrency: Annotated[int, Field(ge=0)] = 0
    cpu: Quantity = "3"
    memory: Quantity = "12Gi"
    gpus: Annotated[int, Field(ge=0, le=16)] = 0
    accelerator: str | None = None
    retries: Annotated[int, Field(ge=0, le=100)] = 3
    grace_s: Annotated[int, Field(ge=1, le=3600)] = 60
    image: str | None = None
    pod_template: str | None = None
    labels: Labels = field(default_factory=dict)
    node_selector: Labels = field(default_factory=dict)
    tolerations: Items = ()
    env: Items = ()
    secrets: Items = ()
    usd_per_hour: Annotated[float, Field(ge=0, le=1e6)] | None = None

    def __post_init__(self) -> None:
        if self.image is not None:
            checked_image(self.image)
        if self.accelerator is not None:
            check_label_value("accelerator", self.accelerator)
        if self.pod_template:
            check_subdomain("pod_template", self.pod_template)
        check_pod_labels("labels", self.labels)
        check_labels("node_selector", self.node_selector)
        check_tolerations("tolerations", self.tolerations)
        check_env("env", self.env)
        check_secrets("secrets", self.secrets)
        for label, value in self.node_selector.items() if self.interruptible else ():
            if is_spot_label(label, value or ""):
                raise ValueError(
                    f"node_selector.{label}: value {value or ''!r}; allowed with interruptible true: no label of spot "
                    "machines, because Flyte's last attempt runs on a reserved machine, which does not have it"
                )

    @property
    def shared_memory(self) -> bool:
        """Whether Flyte gives the pods a shared-memory volume."""
        return True

    @property
    def image_name(self) -> str:
        """The name of the image at registration in which the pods run, unless `image` names another."""
        return "train"

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

    Attributes:
        count: number of slots; 0 leaves the pool out of training's iterations.
        count_min: smallest number of slots of a planned iteration when the planner chooses the width.
        egress_usd_per_gb: price of reading the run's store from another region or cloud.
        trace_path: for forecasts, a trace of such machines; None: the process AWS_P3 of resources.spot_trace.
    """

    __pydantic_config__ = STRICT
    interruptible: bool = True
    count: Annotated[int, Field(ge=0, le=10_000)] = 2
    count_min: Annotated[int, Field(ge=0, le=10_000)] = 1
    egress_usd_per_gb: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    trace_path: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count_min > self.count:
            raise ValueError(f"count_min: {self.count_min} given; allowed: 0 to count ({self.count})")


@dataclass(frozen=True, kw_only=True)
class ControlPoolConfig(PoolConfig):
    """The machine of plan and conclude: small and reserved."""

    __pydantic_config__ = STRICT
    cpu: Quantity = "1"
    memory: Quantity = "4Gi"
    usd_per_hour: Annotated[float, Field(ge=0, le=1e6)] | None = 0.0

    @property
    def shared_memory(self) -> bool:
        """False, because neither plan nor conclude has processes that share tensors."""
        return False

    @property
    def image_name(self) -> str:
        """The image given without a name, in which everything runs that is started before a configuration is read."""
        return "default"


@dataclass(frozen=True, kw_only=True)
class PoolsConfig:
    """The machines of a run.

    Attributes:
        rollout: a pool of the crew.
        more_rollout: further pools of the crew by name: other kinds of machines, other regions, reserved ones.
        train: the reserved machine of the trainer.
        control: the machine of plan and conclude.
        scoring: the machines that score by teachers, by name; `teacher.pool` names the pool.
        labels: for the pods of all pools, for example the team that pays; a pool's own labels have precedence.
    """

    __pydantic_config__ = STRICT
    rollout: RolloutPoolConfig = field(default_factory=RolloutPoolConfig)
    more_rollout: dict[str, RolloutPoolConfig] = field(default_factory=dict)
    train: PoolConfig = field(default_factory=PoolConfig)
    control: ControlPoolConfig = field(default_factory=ControlPoolConfig)
    scoring: dict[str, PoolConfig] = field(default_factory=dict)
    labels: Labels = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pod_labels("labels", self.labels)
        if self.train.interruptible:
            raise ValueError("train.interruptible: true given; allowed: false, the trainer runs on reserved machines")
        if self.train.count != 1:
            raise ValueError(f"train.count: {self.train.count} given; allowed: 1")
        for section, pools in (("more_rollout", self.more_rollout), ("scoring", self.scoring)):
            check_pool_names(section, pools)
        both = sorted(set(self.more_rollout) & set(self.scoring))
        if both:
            raise ValueError(f"scoring: {both[0]!r} given; allowed: other names than those of more_rollout")

    @property
    def rollout_pools(self) -> dict[str, RolloutPoolConfig]:
        """The pools of the crew by name, `rollout` first."""
        return {"rollout": self.rollout, **self.more_rollout}

    def named(self, name: str) -> PoolConfig:
        """The pool of this name; raises KeyError if there is none."""
        own = {"train": self.train, "control": self.control, **self.scoring}
        return own[name] if name in own else self.rollout_pools[name]

    @property
    def by_path(self) -> dict[str, PoolConfig]:
        """All pools by the path of their section."""
        pools = {**self.rollout_pools, "train": self.train, "control": self.control}
        pools |= {f"{SCORING}{name}": pool for name, pool in self.scoring.items()}
        return {pool_path(name): pool for name, pool in pools.items()}

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
        for path, pool in self.by_path.items():
            try:
                _ = pool.price_usd_per_h
            except UnknownMachine as error:
                raise UnknownMachine(f"{path}.{error}") from None
        price_table()


def checked_image(reference: str) -> str:
    """Return `reference`; raises ValueError unless it names a tag or digest, so that a run can be repeated."""
    if not _IMAGE.fullmatch(reference):
        raise ValueError(f"image: value {reference!r}; allowed: registry/name:tag or registry/name@sha256:digest")
    return reference


def pool_path(name: str) -> str:
    """The path of a pool's section in the configuration; the name of a pool of scorers begins with SCORING."""
    own = name in RESERVED_NAMES or name.startswith(SCORING)
    return f"pools.{name}" if own else f"pools.more_rollout.{name}"


def check_pool_names(section: str, pools: Collection[str]) -> None:
    """Raise ValueError unless pods and nodes can have the names of a section's pools."""
    for name in pools:
        if not re.fullmatch(POOL_NAME, name):
            raise ValueError(
                f"{section}: value {name!r}; allowed: names of up to 40 small letters, digits, - and _, a "
                "letter first and a letter or digit last, because pods have the name as a label"
            )
    # Flyte's node ids allow no underscores.
    names = [name.replace("_", "-") for name in pools]
    alike = sorted(name for name in set(names) if names.count(name) > 1)
    if alike:
        raise ValueError(f"{section}: two pools are called {alike[0]!r} where _ is -; allowed: different names")
    taken = sorted(RESERVED_NAMES.intersection(pools))
    if taken:
        raise ValueError(f"{section}: {taken[0]!r} given; allowed: other names than {sorted(RESERVED_NAMES)}")


def check_pod_labels(path: str, labels: Labels) -> None:
    """Raise ValueError unless a pod can have these labels, beside those of every pod of a run."""
    check_labels(path, labels)
    for taken in COST_LABELS:
        if taken in labels:
            raise refuse(f"{path}.{taken}", labels[taken], "nothing, because every pod of a run gets this label")


def overrides(pool: PoolConfig, labels: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """Arguments for a Flyte node's `with_overrides`: requests together with limits, so neither clamps the other.

    labels: for the pod, beside the pool's own labels, which have precedence.
    """
    from flytekit import Resources  # noqa: PLC0415 - flytekit costs a second; pure users of pools must not pay it
    from flytekit.extras.accelerators import GPUAccelerator  # noqa: PLC0415

    ask = Resources(cpu=pool.cpu, mem=pool.memory, gpu=str(pool.gpus) if pool.gpus else None)
    chosen: dict[str, Any] = {
        "requests": ask,
        "limits": ask,
        "interruptible": pool.interruptible,
        "retries": pool.retries,
        "pod_template": pod_template(pool, labels),
    }
    if pool.shared_memory:
        chosen["shared_memory"] = True
    if pool.accelerator is not None:
        chosen["accelerator"] = GPUAccelerator(pool.accelerator)
    image = pool.image or registered_image(pool.image_name)
    if image is not None:
        chosen["container_image"] = image
    return chosen


def registered_image(name: str) -> str | None:
    """The image given by `--image name=...` at registration; None for the default image, or if none has the name."""
    from flytekit.core.context_manager import FlyteContextManager  # noqa: PLC0415 - as above

    settings = FlyteContextManager.current_context().serialization_settings
    if settings is None or name == "default":
        return None
    found = settings.image_config.find_image(name)
    return None if found is None else str(found.full)


def task_settings(pool: PoolConfig) -> dict[str, Any]:
    """Arguments for `@task` or `@dynamic` of a task that runs on `pool` by default; the same as a node's overrides.

    They serve tasks that are declared before a configuration is known, or run without a configuration's overrides. A
    task that requests nothing would get the platform's default, 200 MiB on Flyte's own.
    """
    return overrides(pool)


def pod_template(pool: PoolConfig, labels: Mapping[str, str | None] | None = None) -> "PodTemplate":
    """What a pod of the pool is beyond Flyte's own arguments; labels as in `overrides`."""
    from resources.pod_template import PoolPodTemplate, secret_requests  # noqa: PLC0415 - as flytekit

    asked_labels, asked_annotations = secret_requests(pool.secrets)
    return PoolPodTemplate(
        labels={**(labels or {}), **pool.labels, **asked_labels},
        annotations=asked_annotations,
        pod={
            "termination_grace_period_seconds": pool.grace_s,
            "node_selector": {label: value or "" for label, value in pool.node_selector.items()},
            "tolerations": list(pool.tolerations),
        },
        container={"env": list(pool.env)},
    )
