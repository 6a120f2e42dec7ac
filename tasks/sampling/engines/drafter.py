"""Drafter: the protocol by which an engine gets likely next tokens, which the engine verifies.

A token is the maximum of log-probs and keyed noise, and depends on no draft. An engine feeds the drafts of a response
behind its last token, draws our token at each position, and keeps draws while they equal the drafts. So a drafter
decides how many steps a response takes, and never a token: a drafter may guess, change, or forget.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines.engine import GenerationRequest

# Tokens that a step feeds for each response: few shapes, of which each is compiled or recorded once.
WIDTHS = (1, 2, 3, 5, 1 + DRAFTS_MAX)


class Drafter(Protocol):
    """One engine uses it, in one thread; responses go by their numbers in the plan."""

    def start(self, requests: Sequence[GenerationRequest], tokens: Sequence[Sequence[int]]) -> None:
        """These responses come into flight.

        `tokens`: of each response the token ids of prompt and response, a list that the engine appends to until the
        response leaves. So a drafter that is not asked costs nothing.
        """
        ...

    def draft(self, responses: Sequence[int], most: int) -> list[Sequence[int]]:
        """Guess the next tokens of each response in flight, in order: `most` token ids, or fewer, or none."""
        ...

    def leave(self, responses: Sequence[int]) -> None:
        """These responses are in flight no more, and their tokens are complete: they have ended, or were aborted."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """An optional ability of engines and drafters: drafting from responses that were generated elsewhere or earlier."""

    def remember(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """Take in the token ids of responses to a prompt, whole or in part; called in the engine's thread at any time.

        Prompt and responses of the same call may be forgotten at will.
        """
        ...


@runtime_checkable
class Computes(Protocol):
    """An optional ability of drafters: drafts are computed one after the other, and each takes as long as the first.

    Such a drafter is asked for as many drafts as are verified; others are asked for all that they know.

    Attributes:
        pass_s: seconds that each draft of all responses took, the last time that there were any; None: not known.
    """

    pass_s: float | None

    def restart(self) -> None:
        """After a breakdown, with no response in flight: drop what takes memory, and make it anew.

        Raises EngineDied when the device fails again.
        """
        ...
