"""A penalty on length: nothing up to a number of tokens, then growing in proportion, never more than 1.

It knows neither the limit of a response nor its group, and runs in this process because it cannot fail.
"""

from collections.abc import Sequence

from tasks.grading.reward import GradingCase, Needs, RewardOutcome


def length_penalty(tokens: int, free_tokens: int, scale_tokens: int) -> float:
    """-max(0, tokens - free_tokens) / scale_tokens, -1 at least: in [-1, 0].

    The form of DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), with a free length of one's choice.
    """
    return max(-1.0, -max(0, tokens - free_tokens) / scale_tokens)


class LengthReward:
    """The penalty on a completion's tokens, the one that ends it included."""

    needs: Needs = ()

    def __init__(self, name: str, free_tokens: int, scale_tokens: int) -> None:
        self.name = name
        self._free_tokens, self._scale_tokens = free_tokens, scale_tokens

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        return [
            RewardOutcome(length_penalty(len(case.completion_ids), self._free_tokens, self._scale_tokens))
            for case in batch
        ]

    def close(self) -> None:
        pass
