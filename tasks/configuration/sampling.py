"""The section `sampling`: how a token is drawn, how long a response may be, and how it is read as text."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from storage.records.records import SamplingParams

STRICT = ConfigDict(extra="forbid", strict=True)
# Fields that are younger than runs that go on, with their defaults, at which they say what such a run does.
YOUNG: dict[str, object] = {"skip_special_tokens": True}


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The sampling of tokens; the defaults sample from the policy itself.

    Attributes:
        temperature: 0 is greedy.
        top_p: 1 is off.
        top_k: 0 is off.
        max_completion_length: The most tokens of a response.
        skip_special_tokens: Rewards and agents read no special tokens; False: all but the stop token.
    """

    __pydantic_config__ = STRICT
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_completion_length: Annotated[int, Field(ge=1)] = 1024
    skip_special_tokens: bool = True

    def params(self, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """The record of these settings and the stop tokens, as a plan holds it."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_completion_length=self.max_completion_length,
            stop_token_ids=stop_token_ids,
            skip_special_tokens=self.skip_special_tokens,
        )
