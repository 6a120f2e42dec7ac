"""What the pools of the crew must be together with other sections."""

from collections.abc import Iterator

from resources.pools import PoolConfig, PoolsConfig, pool_path
from tasks.configuration.forecast import ForecastConfig
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.rollout import RolloutConfig


def pools_that_clash(
    pools: PoolsConfig, rollout: RolloutConfig, planning: PlanningConfig, forecast: ForecastConfig
) -> Iterator[str]:
    """A line about each field that cannot be, with what is allowed."""
    crew, per_engine = pools.rollout_pools, rollout.vllm.tensor_parallel_size
    if not sum(pool.count for pool in crew.values()) and planning.seeding == "off":
        yield "pools.rollout.count: value 0; allowed with planning.seeding 'off': at least 1 in one pool of the crew"
    generating: dict[str, PoolConfig] = {name: pool for name, pool in crew.items() if pool.count}
    if planning.seeding == "auto":
        generating["train"] = pools.train
    for name, pool in generating.items():
        if rollout.engine == "vllm" and 0 < pool.gpus < per_engine:
            yield (
                f"{pool_path(name)}.gpus: value {pool.gpus}; allowed: 0, or at least rollout.vllm.tensor_parallel_size "
                f"({per_engine})"
            )
    for name in sorted(forecast.more_rollout.keys() - pools.more_rollout.keys()):
        allowed = ", ".join(pools.more_rollout) or "none, because pools.more_rollout has none"
        yield f"forecast.more_rollout: {name!r} given; allowed: {allowed}"
