"""What the pools of the crew must be together with other sections."""

from collections.abc import Iterator

from resources.pools import PoolConfig, PoolsConfig, pool_path
from resources.quantities import amount
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.rollout import RolloutConfig

# The least and the most that can be meant: no task of a run starts with less than the first, and a quantity beyond the
# second has another suffix than was meant. Kubernetes accepts both.
SIZES = {"cpu": ("10m", "10k"), "memory": ("64Mi", "1Pi")}


def sizes_not_meant(pools: PoolsConfig) -> Iterator[str]:
    """A line about each pool that asks for next to nothing, or for more than any machine has."""
    for path, pool in pools.by_path.items():
        for name, (least, most) in SIZES.items():
            value = getattr(pool, name)
            if not amount(least) <= amount(value) <= amount(most):
                yield f"{path}.{name}: value {value!r}; allowed: {least} to {most}"


def pools_that_clash(pools: PoolsConfig, rollout: RolloutConfig, planning: PlanningConfig) -> Iterator[str]:
    """A line about each field that cannot be, with what is allowed."""
    crew, per_engine = pools.rollout_pools, rollout.vllm.tensor_parallel_size
    if not sum(pool.count for pool in crew.values()) and planning.seeding == "off":
        yield "pools.rollout.count: value 0; allowed with planning.seeding 'off': at least 1 in one pool of the crew"
    generating: dict[str, PoolConfig] = {name: pool for name, pool in crew.items() if pool.count}
    if planning.seeding == "auto":
        generating["train"] = pools.train
    for name, pool in generating.items():
        if rollout.engine in ("vllm", "auto") and pool.gpus % per_engine:
            yield (
                f"{pool_path(name)}.gpus: value {pool.gpus}; allowed: 0, or a multiple of "
                f"rollout.vllm.tensor_parallel_size ({per_engine}), which a member uses"
            )
