"""The section `lora`: the layers with an adapter, and the adapters' size."""

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
