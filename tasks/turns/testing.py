"""What every Environments must do: tests for pytest that the author of environments inherits.

A test file subclasses EnvironmentsContract and supplies the fixture `told`. In most tests two incarnations answer one
conversation, as after the loss of a member.
"""

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import pytest

from storage.journal.shard import Finish
from storage.journal.turns import TurnRecord, decode_turn
from tasks.turns.environments import Answer, Environments, OpenTurn

RESPONSES = 12
LIMIT_S = 300


def record_of(answer: Answer) -> TurnRecord:
    return decode_turn(answer.event)


def gathered(environments: Environments, count: int) -> dict[int, Answer]:
    """The next answers, by response; fails after LIMIT_S."""
    answers: dict[int, Answer] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while len(answers) < count:
        assert time.monotonic() < deadline_s
        answers |= {answer.response: answer for answer in environments.answers(1.0)}
    return answers


def answered(environments: Environments, turn: OpenTurn) -> Answer:
    """The answer to one turn, while no other is open."""
    environments.begin([turn])
    return gathered(environments, 1)[turn.response]


class Told(ABC):
    """A conversation in the language of the environments under test, and how to open them."""

    @abstractmethod
    def environments(self, *, rebuilds: bool = True) -> Environments:
        """Those of a new incarnation, whose environments can be rebuilt or not; a response has 3 attempts."""

    @abstractmethod
    def calling(self, response: int) -> OpenTurn:
        """A first turn that makes a call."""

    @abstractmethod
    def calling_again(self, turn: OpenTurn, answer: Answer) -> OpenTurn:
        """The turn after an answer; it makes a call."""

    @abstractmethod
    def ending(self, turn: OpenTurn, answer: Answer) -> OpenTurn:
        """The turn after an answer; it makes no call."""

    @abstractmethod
    def with_side_effect(self, response: int) -> OpenTurn:
        """A first turn that calls a tool with side effects."""


class EnvironmentsContract:
    @pytest.fixture
    def told(self) -> Told:
        raise NotImplementedError

    def test_without_open_turns_there_is_nothing_to_wait_for(self, told: Told) -> None:
        assert told.environments().answers(1e9) == []

    def test_every_turn_is_answered_once(self, told: Told) -> None:
        environments = told.environments()
        turns = [told.calling(response) for response in range(RESPONSES)]
        environments.begin(turns[:5])
        environments.begin(turns[5:])
        answers = gathered(environments, RESPONSES)
        assert sorted(answers) == list(range(RESPONSES))
        for turn in turns:
            answer = answers[turn.response]
            assert (answer.epoch, answer.finish) == (turn.epoch, Finish.RUNNING)
            assert 0 < len(answer.token_ids) < turn.room
            assert record_of(answer).turn == 0
            assert answer.seconds >= 0
        assert environments.answers(0.0) == []

    def test_a_response_ends_when_it_calls_nothing_more(self, told: Told) -> None:
        environments = told.environments()
        turn = told.calling(0)
        last = answered(environments, told.ending(turn, answered(environments, turn)))
        assert (last.finish, last.token_ids, record_of(last).calls) == (Finish.STOP, (), ())
        assert record_of(last).turn == 1

    def test_without_room_nothing_is_called(self, told: Told) -> None:
        changes: list[dict[str, Any]] = [{"room": 0}, {"token_ids": told.calling(0).token_ids[:-1]}]
        for response, change in enumerate(changes):
            answer = answered(told.environments(), replace(told.calling(response), **change))
            assert (answer.finish, answer.token_ids, record_of(answer).calls) == (Finish.LENGTH, (), ())

    def test_an_observation_that_does_not_fit_is_left_out(self, told: Told) -> None:
        turn = told.calling(0)
        size = len(answered(told.environments(), turn).token_ids)
        for room, finish in ((size, Finish.LENGTH), (size + 1, Finish.RUNNING)):
            answer = answered(told.environments(), replace(turn, room=room))
            assert answer.finish is finish
            assert len(record_of(answer).calls) == 1

    def test_an_answer_does_not_depend_on_who_gives_it(self, told: Told) -> None:
        """Nor on which incarnation answered earlier turns, or on what else is open."""
        undisturbed, other = told.environments(), told.environments()
        turn = told.calling(3)
        first = answered(undisturbed, turn)
        second_turn = told.calling_again(turn, first)
        second = answered(undisturbed, second_turn)
        other.begin([told.calling(response) for response in range(3)])
        other.begin([second_turn])
        again = gathered(other, 4)[3]
        assert (again.token_ids, again.finish) == (second.token_ids, second.finish)
        ids = [call.call_id for each in (first, second) for call in record_of(each).calls]
        assert len(set(ids)) == len(ids)
        assert [call.call_id for call in record_of(again).calls] == ids[len(record_of(first).calls) :]
        third = answered(other, told.ending(second_turn, again))
        assert record_of(third).reward == record_of(answered(undisturbed, told.ending(second_turn, second))).reward

    def test_what_cannot_be_rebuilt_begins_again_then_fails(self, told: Told) -> None:
        turn = told.calling(0)
        first = answered(told.environments(rebuilds=False), turn)
        for restarts, finish in ((1, Finish.AGAIN), (2, Finish.FAILED)):
            late = replace(told.calling_again(turn, first), restarts=restarts)
            answer = answered(told.environments(rebuilds=False), late)
            assert (answer.finish, answer.token_ids, record_of(answer).reward) == (finish, (), None)
            assert record_of(answer).failure

    def test_an_unknown_call_says_so(self, told: Told) -> None:
        answer = answered(told.environments(), replace(told.calling(0), unknown=True))
        assert [call.unknown for call in record_of(answer).calls] == [True]
        same = answered(told.environments(), told.calling(0))
        assert [call.call_id for call in record_of(same).calls] == [call.call_id for call in record_of(answer).calls]

    def test_forgotten_turns_are_not_answered(self, told: Told) -> None:
        environments = told.environments()
        environments.begin([told.calling(response) for response in range(4)])
        environments.forget([0, 2, 100])
        assert sorted(gathered(environments, 2)) == [1, 3]
        assert environments.answers(0.0) == []
        assert answered(environments, told.calling(0)).response == 0

    def test_a_response_may_be_begun_again_after_it_was_forgotten(self, told: Told) -> None:
        environments = told.environments()
        turn = told.calling(0)
        for _ in range(20):
            environments.begin([turn])
            environments.forget([0])
        environments.begin([turn])
        assert sorted(gathered(environments, 1)) == [0]
        assert environments.answers(0.0) == []

    def test_side_effects_wait_for_the_journal(self, told: Told) -> None:
        environments = told.environments()
        assert environments.waits_for_journal(told.with_side_effect(0))
        assert not environments.waits_for_journal(told.calling(0))

    def test_closing_may_be_repeated(self, told: Told) -> None:
        environments = told.environments()
        environments.begin([told.calling(0)])
        environments.close()
        environments.close()
        assert environments.answers(1e9) == []
