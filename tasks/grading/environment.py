"""The reward that the environment itself gave at the end of a response, as the journal holds it.

Nothing is called: `get_reward` was asked where the environment lived. So it cannot fail, and runs in this process.
"""

from collections.abc import Sequence

from tasks.grading.reward import GradingCase, Needs, RewardOutcome


class EnvironmentReward:
    """What the environment's get_reward returned; not applicable if it returned None, or if the class has none."""

    needs: Needs = ()

    def __init__(self, name: str) -> None:
        self.name = name

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        return [RewardOutcome(case.conversation.reward if case.conversation else None) for case in batch]

    def close(self) -> None:
        pass
