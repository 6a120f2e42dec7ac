"""The responses of other runs as examples: `data.runs` names the runs, and `data.select` the responses."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from storage.stores.connect import overlap
from tasks.configuration.origins import iterations_of

# Fields of `data` that say where rows come from, or how text becomes tokens.
_OF_ROWS = (
    "source",
    "subset",
    "split",
    "revision",
    "prompt_column",
    "completion_column",
    "chosen_column",
    "rejected_column",
    "chat_template_kwargs",
    "continue_final_message",
    "allow",
)
_Number = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """Which responses of other runs are examples; only those that ended by themselves are.

    Attributes:
        reward: The least and the greatest reward of an example, or of the chosen one of a pair; None: any.
        per_prompt: So many examples of a prompt at most, those with the highest reward, or pairs with the largest
            difference; None: all.
        max_length: The most tokens of a response.
        margin: With `algorithm.kind` "dpo", the least difference of the rewards in a pair; equal rewards make no pair.
        grading: The name of a grading by `gleaner regrade`, whose rewards count; None: the recorded rewards.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    reward: tuple[_Number, _Number] | None = None
    per_prompt: Annotated[int, Field(ge=1)] | None = None
    max_length: Annotated[int, Field(ge=1)] | None = None
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grading: Annotated[str, Field(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.reward is not None and self.reward[0] > self.reward[1]:
            raise ValueError(f"reward: value {list(self.reward)}; allowed: the least reward, then the greatest")


def selections_that_clash(config: Any) -> Iterator[str]:
    """A line about each field that cannot be, with what is allowed. config: the RunConfig."""
    if config.evaluation is not None and (config.evaluation.data.runs or config.evaluation.data.select is not None):
        yield "evaluation.data.runs: given; allowed: nothing, because an evaluation samples responses of its own"
    data = config.data
    if not data.runs:
        if data.select is not None:
            yield "data.select: given; allowed without data.runs: nothing"
        return
    if not config.algorithm.learns_examples:
        kind = config.algorithm.kind
        yield f"data.runs: given; allowed with algorithm.kind {kind!r}: nothing, because the policy samples responses"
    defaults = {item.name: getattr(type(data)(), item.name) for item in fields(data)}
    for name in _OF_ROWS:
        value, allowed = getattr(data, name), defaults[name]
        if value != allowed:
            yield (
                f"data.{name}: value {json.dumps(value)}; allowed with data.runs: {json.dumps(allowed)}, because "
                "responses are read as tokens"
            )
    if data.select is not None and data.select.margin and not config.algorithm.learns_pairs:
        yield f"data.select.margin: value {data.select.margin}; allowed without algorithm.kind 'dpo': 0.0"
    for text in data.runs:
        if overlap(iterations_of(text).url, config.run.url):
            yield f"data.runs: value {text!r}; allowed: other runs than run.url, and none above or below it"
