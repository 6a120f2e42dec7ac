"""The verifier of the keyed running sum: every worked step and the answer must be right.

The worked answer is unique, so a completion is right if it equals that. The verifier cannot fail, so it runs in this
process.
"""

from collections.abc import Sequence

from tasks.grading.reward import GradingCase, Needs, RewardOutcome


class ArithmeticReward:
    """The reward 1.0 if the completion equals the column "worked" exactly, else 0.0."""

    needs: Needs = (("worked",),)

    def __init__(self, name: str = "arithmetic") -> None:
        self.name = name

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        return [RewardOutcome(1.0 if case.completion == case.columns["worked"] else 0.0) for case in batch]

    def close(self) -> None:
        pass
