"""A penalty on length: zero up to a number of tokens, then growing in proportion to length, at most 1.

It depends neither on the response's limit nor on its group. It cannot fail, so it runs in this process.
"""

from collections.abc import Sequence

from tasks.grading.reward import GradingCase, Needs, RewardOutcome


def length_penalty(tokens: int, free_tokens: int, scale_tokens: int) -> float:
    """Compute -max(0, tokens - free_tokens) / scale_tokens, but at least -1.

    It has the form of DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), with a configurable free length.
    """
    return max(-1.0, -max(0, tokens - free_tokens) / scale_tokens)


class LengthReward:
    """The penalty on the number of tokens that the policy sampled, including the one that ends the response."""

    needs: Needs = ()

    def __init__(self, name: str, free_tokens: int, scale_tokens: int) -> None:
        self.name = name
        self._free_tokens, self._scale_tokens = free_tokens, scale_tokens

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        return [
            RewardOutcome(length_penalty(case.policy_length, self._free_tokens, self._scale_tokens)) for case in batch
        ]

    def close(self) -> None:
        pass
