"""Environments: the protocol by which a session has the policy's turns answered, and the values that it exchanges.

Real ones are child processes (`process_environments.py`); `scripted_environments.py` is deterministic and runs on any
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

    run_seed, iteration, group, tools: of the plan that the response is of.
    epoch: of the claim under which the response is held; a tool can refuse a caller with an older one.
    token_ids: all tokens of the response so far, those of the turn last. logprobs: of those that the policy sampled.
    events: the answers to its earlier turns.
    turn_start: the position of the turn's first token.
    room: how many tokens may still follow. With 0, or after a turn that no stop token ended, nothing is called.
    unknown: an earlier incarnation may have made the calls of this turn. restarts: how often the response began again.
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

    token_ids: of the observation, up to and with the tokens that ask the policy for its next turn; at most the turn's
    `room`, and none unless `finish` is RUNNING. event: the TurnRecord, as bytes. finish: RUNNING: the policy goes on;
    STOP or LENGTH: the response has ended; FAILED: so it has, because the environment is lost for good; AGAIN: the
    response begins again from its prompt. seconds: how long tools took, which would be lost with the answer.
    objects: states that are too large for the event, by the digest that the event names.
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
