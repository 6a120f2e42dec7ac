"""The verifier of the keyed running sum: every worked step and the answer must be right.

The worked answer is unique, so being right is being equal to it; it runs in this process because it cannot fail.
"""

from collections.abc import Sequence

from tasks.grading.reward import GradingCase, Needs, RewardOutcome


class ArithmeticReward:
    """1.0 when the completion is the column "worked" to the letter, else 0.0."""

    needs: Needs = (("worked",),)

    def __init__(self, name: str = "arithmetic") -> None:
        self.name = name

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        return [RewardOutcome(1.0 if case.completion == case.columns["worked"] else 0.0) for case in batch]

    def close(self) -> None:
        pass
