"""Rewards without a worker process, because none of the three can fail: arithmetic, environment and length."""

from collections.abc import Sequence

from tasks.grading.reward import GradingCase, Needs, RewardOutcome


class ArithmeticReward:
    """The verifier of the keyed running sum: 1.0 for a completion equal to the column "worked", otherwise 0.0.

    Every worked step and the answer must be right, because a problem has a single worked answer.
    """

    needs: Needs = (("worked",),)

    def __init__(self, name: str = "arithmetic") -> None:
        self.name = name

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        return [RewardOutcome(1.0 if case.completion == case.columns["worked"] else 0.0) for case in batch]

    def close(self) -> None:
        pass


class EnvironmentReward:
    """The result of the environment's get_reward at the end of a response, as the journal holds the number.

    Not applicable if get_reward returned None, or if the class of the environment has no get_reward.
    """

    needs: Needs = ()

    def __init__(self, name: str) -> None:
        self.name = name

    def grade(self, batch: Sequence[GradingCase]) -> list[RewardOutcome]:
        return [RewardOutcome(case.conversation.reward if case.conversation else None) for case in batch]

    def close(self) -> None:
        pass


def length_penalty(tokens: int, free_tokens: int, scale_tokens: int) -> float:
    """Compute -max(0, tokens - free_tokens) / scale_tokens, but at least -1.

    The form is DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), with a configurable free length.
    """
    return max(-1.0, -max(0, tokens - free_tokens) / scale_tokens)


class LengthReward:
    """`length_penalty` of the number of tokens that the policy sampled, including the stop token.

    The penalty depends neither on the response's limit nor on its group.
    """

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
