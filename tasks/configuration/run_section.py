"""The sections `run` and `policy`: where a run is, its size, and the model with which it begins."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from storage.stores.connect import check_url
from tasks.configuration.origins import version_of

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """The identity of the run, and the size of a step.

    Attributes:
        url: A directory, s3://bucket/prefix or memory://name.
        seed: Seed of the sampling noise; data.seed orders the prompts.
        num_prompts_per_step: Groups per iteration.
        num_generations: Responses per group.
        from_: The version of another run that is version 0 of this run, <url>@<version>; None: the pretrained model.
        from_optimizer: Go on with that version's optimizer, and count on from its iterations.
        lease_ttl_s: Seconds until a silent execution is replaced by another; longer than pods wait for machines.
    """

    __pydantic_config__ = STRICT
    url: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    num_prompts_per_step: Annotated[int, Field(ge=1)] = 32
    num_generations: Annotated[int, Field(ge=1)] = 8
    from_: Annotated[Annotated[str, Field(min_length=1)] | None, Field(alias="from")] = None
    from_optimizer: bool = False
    lease_ttl_s: Annotated[float, Field(ge=1, le=86_400)] = 3600.0

    def __post_init__(self) -> None:
        try:
            check_url(self.url)
        except ValueError as error:
            raise ValueError(f"url: {str(error).removeprefix('storage URL: ')}") from None
        if self.from_ is not None:
            version_of(self.from_)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The model with which the run begins; left out beside `run.from`: the other run's.

    Attributes:
        path: A Hugging Face model directory where `plan` runs, or the id of a model on the hub; beside `run.from` its
            weights are not used.
        revision: Of an id: branch, tag or commit; None: main.
    """

    __pydantic_config__ = STRICT
    path: Annotated[str, Field(min_length=1)]
    revision: Annotated[str, Field(min_length=1)] | None = None
