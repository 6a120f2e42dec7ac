"""The responses of an iteration: lengths, journalled tokens with the lives that decoded each, and ended responses."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from storage.records.records import SlotPlan
from tasks.crew_model.accounts import Life


class ToolAnswer(NamedTuple):
    """A tool's answer, for which a response waits `wait_s` seconds after its first `at_tokens` tokens."""

    at_tokens: int
    wait_s: float


class Responses:
    """Responses by number, as in a plan: response r is sample r % num_generations of group r // num_generations.

    Every decoded token is in the end either journalled or wasted, and counts for the life that decoded the token.
    answers: for each response the tool answers to wait for, in order; empty: no tools.

    Attributes:
        length: The tokens of each response at its end.
        journalled_tokens: The journalled tokens of each response.
        generations: Responses of a group.
        left: The number of unfinished responses.
        group_left: The number of unfinished responses of each group.
        group_tokens: The tokens of each group at its end.
        unit: For each response, the slot of its first assignment.
        of_unit: The responses of each slot's first assignment, in order.
        unit_left: The number of unfinished responses of each slot's first assignment.
        owed: Responses whose turn has ended without an answer yet.
    """

    def __init__(
        self, lengths: npt.NDArray[np.int64], slots: Sequence[SlotPlan], answers: Sequence[tuple[ToolAnswer, ...]] = ()
    ) -> None:
        groups, generations = int(lengths.shape[0]), int(lengths.shape[1])
        self.length: list[int] = lengths.ravel().tolist()
        self.journalled_tokens = [0.0] * len(self.length)
        self.generations = generations
        self.left = len(self.length)
        self.group_left = [generations] * groups
        self.group_tokens: list[int] = lengths.sum(axis=1).tolist()
        self.unit = [0] * len(self.length)
        self.of_unit: dict[int, tuple[int, ...]] = {}
        for slot in slots:
            samples = tuple(group * generations + k for group in slot.groups for k in range(generations))
            self.of_unit[slot.slot] = samples
            for response in samples:
                self.unit[response] = slot.slot
        self.unit_left = {unit: len(samples) for unit, samples in self.of_unit.items()}
        self.owed: set[int] = set()
        self._answers = answers
        self._answered: dict[int, int] = {}
        self._ended = bytearray(len(self.length))
        self._parts: dict[int, list[tuple[Life, float]]] = {}

    def ended(self, response: int) -> bool:
        return bool(self._ended[response])

    def group(self, response: int) -> int:
        return response // self.generations

    def keep(self, response: int, life: Life, tokens: float) -> None:
        """Count `tokens` more tokens of the response as journalled."""
        life.decoded += tokens
        self.journalled_tokens[response] += tokens
        self._parts.setdefault(response, []).append((life, tokens))

    @property
    def tool_s(self) -> float:
        """The sum of all responses' seconds of waiting for tools."""
        return sum(answer.wait_s for answers in self._answers for answer in answers)

    def answered(self, response: int) -> int:
        """The number of tool answers that the response has, all journalled."""
        return self._answered.get(response, 0)

    def next_answer(self, response: int) -> ToolAnswer | None:
        """The present or next tool answer to wait for; None after the last."""
        answers, done = self._answers[response] if self._answers else (), self.answered(response)
        return answers[done] if done < len(answers) else None

    def turn_end(self, response: int) -> int:
        """The tokens of the response at the end of its present turn."""
        answer = self.next_answer(response)
        return self.length[response] if answer is None else answer.at_tokens

    def end_turn(self, response: int, life: Life) -> None:
        """End the present turn at its last token: an answer is owed, and the decoded tokens are journalled."""
        self.keep(response, life, self.turn_end(response) - self.journalled_tokens[response])
        self.owed.add(response)

    def answer(self, response: int) -> None:
        """The owed answer has come."""
        self.owed.remove(response)
        self._answered[response] = self.answered(response) + 1

    def waste(self, life: Life, tokens: float) -> None:
        """Count `tokens` tokens as decoded for nothing."""
        life.decoded += tokens
        life.wasted += tokens

    def begin_again(self, response: int) -> None:
        """Discard the tokens of the response, and let the response begin again from its prompt."""
        for life, tokens in self._parts.pop(response, ()):
            life.wasted += tokens
        self.journalled_tokens[response] = 0.0
        self.owed.discard(response)
        self._answered.pop(response, None)

    def end(self, response: int, life: Life) -> bool:
        """End the response at its last token; returns whether the group is now complete."""
        life.decoded += self.length[response] - self.journalled_tokens[response]
        self.journalled_tokens[response] = float(self.length[response])
        self._parts.pop(response, None)
        self._ended[response] = 1
        self.left -= 1
        self.unit_left[self.unit[response]] -= 1
        self.group_left[self.group(response)] -= 1
        return self.group_left[self.group(response)] == 0
