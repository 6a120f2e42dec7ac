"""Parts: an iteration's responses in ascending order, a bounded number of tokens at a time.

A process that compacts, verifies or reads an iteration holds one part in memory. A compacted iteration stores its
recorded responses by parts: a part is an object, and a small record, created last, names every part.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from storage.records.records import STRICT, GradedResponse, PlanRecord

# Compacting takes about 50 bytes of memory per token of a part (benchmarks/compaction.py), and the task that does it
# has 4 GiB by default.
PART_TOKENS = 1 << 25


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """An object with all recorded responses from number `first` to number `last`; `digest` is from its trailer."""

    __pydantic_config__ = STRICT
    first: int
    last: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class ResponsesRecord:
    """responses.json: the iteration is compacted; `parts` hold its recorded responses, in ascending order."""

    KIND: ClassVar[str] = "responses"
    __pydantic_config__ = STRICT
    iteration: int
    parts: tuple[StoredPart, ...]

    def __post_init__(self) -> None:
        bounds = [number for part in self.parts for number in (part.first, part.last)]
        is_ascending = all(before.last < after.first for before, after in pairwise(self.parts))
        if min(bounds, default=0) < 0 or not is_ascending or any(part.first > part.last for part in self.parts):
            raise ValueError(f"parts: responses {bounds[:8]}; allowed: first to last of each, in ascending order")


def divide(lengths: Mapping[int, int], part_tokens: int = PART_TOKENS) -> list[range]:
    """The parts of responses, whose numbers ascend, by their `lengths` in tokens.

    A part holds at most `part_tokens` tokens, or a single longer response. The range of a part runs from its first to
    its last response. Raises ValueError for less than one token.
    """
    if part_tokens < 1:
        raise ValueError(f"part_tokens: value {part_tokens}; allowed: 1 or more")
    parts: list[range] = []
    tokens = 0
    for response, length in lengths.items():
        if parts and tokens + length <= part_tokens:
            parts[-1] = range(parts[-1].start, response + 1)
            tokens += length
        else:
            parts.append(range(response, response + 1))
            tokens = length
    return parts


def parts_of_plan(plan: PlanRecord, graded: Iterable[GradedResponse], part_tokens: int = PART_TOKENS) -> list[range]:
    """The parts of all responses of a plan; an unrecorded response counts with the plan's maximal length."""
    longest = plan.sampling.max_completion_length
    recorded = {response.response: response.length for response in graded}
    return divide({number: recorded.get(number, longest) for number in range(plan.num_responses)}, part_tokens)
