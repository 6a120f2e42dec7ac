"""How a session ends."""

from dataclasses import dataclass


class Preempted(Exception):  # noqa: N818 - not an error: the machine is taken away, and all tokens are journalled
    """A notice came; unless the store failed, all tokens are flushed, and held responses are free for other members."""


@dataclass
class EngineHealth:
    """What a process knows of its engine, from one session to the next, however a session ends.

    Attributes:
        died: whether the engine must be restarted before its next use.
    """

    died: bool = False


@dataclass(frozen=True, kw_only=True)
class SessionOutcome:
    """The work of an incarnation.

    Attributes:
        incarnation: the name of the incarnation; empty if none claimed anything.
        tokens_generated: the number of tokens from the engine.
        tokens_recovered: the number of the policy's tokens that other incarnations had journalled.
        responses_finished: the number of responses that ended.
    """

    incarnation: str
    tokens_generated: int
    tokens_recovered: int
    responses_finished: int

    def __add__(self, other: "SessionOutcome") -> "SessionOutcome":
        """The sum of two outcomes; `other` is later, and gives the name of the incarnation."""
        return SessionOutcome(
            incarnation=other.incarnation,
            tokens_generated=self.tokens_generated + other.tokens_generated,
            tokens_recovered=self.tokens_recovered + other.tokens_recovered,
            responses_finished=self.responses_finished + other.responses_finished,
        )

    @classmethod
    def of_nothing(cls) -> "SessionOutcome":
        """The outcome of a process that found nothing to do and claimed nothing."""
        return cls(incarnation="", tokens_generated=0, tokens_recovered=0, responses_finished=0)
