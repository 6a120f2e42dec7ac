"""The section `lora`: the layers with an adapter, and the adapters' size."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Train adapters of low rank instead of the policy itself (arXiv 2106.09685), through the library peft.

    Attributes:
        rank: The rank of a layer's difference, which is the product of two factors.
        alpha: The difference is multiplied by alpha / rank.
        target_modules: The names, or ends of names ("q_proj"), of the layers that get an adapter; if empty, all linear
            layers but the head.
        publish: What a weight version holds: "merged", the model with the adapters merged into it, as differences to
            the version before; or "adapter", the adapters' factors alone, which each member merges into version 0.
    """

    __pydantic_config__ = STRICT
    rank: Annotated[int, Field(ge=1, le=4096)] = 32
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 64.0
    target_modules: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$")], ...] = ()
    publish: Literal["merged", "adapter"] = "merged"


def adapters_that_clash(lora: LoraConfig | None, rank_max: int | None) -> Iterator[str]:
    """A line about each field that cannot be, with what is allowed; rank_max: `rollout.vllm.max_lora_rank`."""
    if rank_max is None:
        return
    if lora is None or lora.publish != "adapter":
        yield f"rollout.vllm.max_lora_rank: value {rank_max}; allowed without lora.publish 'adapter': null"
    elif lora.rank > rank_max:
        yield f"lora.rank: value {lora.rank}; allowed: 1 to rollout.vllm.max_lora_rank ({rank_max}), or that null"
