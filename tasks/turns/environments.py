"""Environments: the protocol by which a session has the policy's turns answered, and the values that it exchanges.

Real ones are child processes (`opened_environments.py`); `scripted_environments.py` is deterministic and runs on any
clock. Every implementation passes tasks/turns/testing.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from storage.journal.shard import Finish
from storage.records.prompt_table import PromptRow

# How often a response whose environment was lost is generated before it is left out of its group.
ATTEMPTS_MAX = 3


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A turn that the policy has ended, and that is to be answered.

    Attributes:
        run_seed: the seed of the run.
        iteration: the iteration of the response.
        group: the group of the response in the plan.
        response: the number of the response in the plan.
        epoch: the epoch of the claim on the response; a tool can refuse a caller with an older epoch.
        prompt: the row of the response's prompt.
        token_ids: the tokens of the response so far, up to the end of the turn.
        logprobs: the log-probs of the tokens that the policy sampled.
        events: the answers to earlier turns of the response.
        turn_start: the position of the turn's first token.
        room: the number of tokens that may still follow. With 0, or after a turn without a stop token at its end,
            nothing is called.
        unknown: whether an earlier incarnation may have made the calls of the turn.
        restarts: the number of times that the response began again.
        tools: the schemas of the plan's tools.
    """

    run_seed: int
    iteration: int
    group: int
    response: int
    epoch: int
    prompt: PromptRow
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    events: tuple[bytes, ...]
    turn_start: int
    room: int
    unknown: bool
    restarts: int
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What follows a turn in the journal.

    Attributes:
        response: the number of the response in the plan.
        epoch: the epoch of the claim under which the turn was begun.
        token_ids: the observation, up to and with the prompt for the policy's next turn; at most the turn's `room`
            tokens, and none unless `finish` is RUNNING.
        event: the TurnRecord, as bytes.
        finish: RUNNING if the policy goes on; STOP or LENGTH if the response has ended; FAILED if the response has
            ended because its environment is lost for good; AGAIN if the response begins again from its prompt.
        seconds: the time that the tools took, which would be lost with the answer.
        objects: pairs of digest and bytes of states that are too large for the event, which names the digests.
    """

    response: int
    epoch: int
    token_ids: tuple[int, ...]
    event: bytes
    finish: Finish
    seconds: float
    objects: tuple[tuple[str, bytes], ...] = ()


class Environments(Protocol):
    """The environments of the responses that a member holds. One thread uses it; only `answers` waits."""

    def waits_for_journal(self, turn: OpenTurn) -> bool:
        """Whether a tool with side effects is called, so that the turn must be in the journal before `begin`."""
        ...

    def begin(self, turns: Sequence[OpenTurn]) -> None:
        """Begin to answer turns, side by side. A response has one open turn at a time."""
        ...

    def answers(self, wait_s: float) -> list[Answer]:
        """The answers since the last call; waits up to `wait_s` for one if there is none yet and turns are open."""
        ...

    def forget(self, responses: Sequence[int]) -> None:
        """End the environments of these responses; their answers are not given. Unknown responses are ignored."""
        ...

    def close(self) -> None:
        """End all environments and their processes."""
        ...
