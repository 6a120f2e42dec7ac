"""Which settings may change between iterations without changing what is learned: places, speeds, prices.

Some fields are younger than runs that go on: the default is what such a run does.
"""

from tasks.configuration.algorithm import YOUNG as YOUNG_OF_ALGORITHM
from tasks.configuration.data import OPERATIONAL as OPERATIONAL_OF_DATA
from tasks.configuration.data import YOUNG as YOUNG_OF_DATA
from tasks.configuration.optimizer import YOUNG as YOUNG_OF_OPTIMIZER
from tasks.configuration.rewards import OPERATIONAL as OPERATIONAL_OF_REWARD
from tasks.configuration.rollout import OPERATIONAL_OF_VLLM
from tasks.configuration.sampling import YOUNG as YOUNG_OF_SAMPLING
from tasks.configuration.turns import OPERATIONAL as OPERATIONAL_OF_TURNS

# The fields of each section; None: all of it.
OPERATIONAL: dict[str, set[str] | None] = {
    "run": {"url", "lease_ttl_s"},
    "data": {*OPERATIONAL_OF_DATA},
    # What lies at the path is compared with what the run holds.
    "rewards": {*OPERATIONAL_OF_REWARD},
    "turns": {*OPERATIONAL_OF_TURNS},
    "rollout": {
        "crew",
        "max_responses_in_flight",
        "flush_interval_s",
        "claim_ttl_s",
        "idle_timeout_s",
        "weight_cache_bytes_max",
        "scripted_step_s",
        "device",
    },
    "rollout.speculation": None,
    "rollout.vllm": {*OPERATIONAL_OF_VLLM},
    "teacher": {"pool", "engine"},
    "teacher.vllm": {*OPERATIONAL_OF_VLLM},
    "trainer": {
        "placement",
        "fleet",
        "device",
        "group_timeout_s",
        "micro_batch_tokens_max",
        "gradient_checkpointing",
        "offload",
        "checkpoint_interval",
        "nnodes",
        "nproc_per_node",
    },
    "evaluation": None,
    "forecast": None,
    "planning": None,
    "pools": None,
    "retention": None,
    "tracking": None,
}
# With their defaults, at which they do not count.
YOUNG: dict[str, object] = {
    "run.from": None,
    "run.from_optimizer": False,
    **{f"algorithm.{name}": default for name, default in YOUNG_OF_ALGORITHM.items()},
    **{f"data.{name}": default for name, default in YOUNG_OF_DATA.items()},
    **{f"sampling.{name}": default for name, default in YOUNG_OF_SAMPLING.items()},
    "teacher.vllm": {"batch_invariant": "auto", "quantization": None, "max_lora_rank": None},
    "teacher": None,
    "trainer.compile_layers": False,
    **{f"optimizer.{name}": default for name, default in YOUNG_OF_OPTIMIZER.items()},
    **{f"critic.optimizer.{name}": default for name, default in YOUNG_OF_OPTIMIZER.items()},
}
# Fields whose default is younger than runs that go on: the default, and the value for which it counts.
DEFAULTS_SINCE: dict[str, tuple[object, object]] = {"trainer.use_liger_kernel": ("auto", False)}
