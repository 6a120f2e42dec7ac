"""What tools and environments draw without a seed of their own is the same in every life of a response."""

import pytest

from storage.journal.turns import call_id
from tasks.configuration.turns import TurnsConfig
from tasks.turns.living_environments import Reset
from tasks.turns.opened_environments import ProcessEnvironments, reset_texts
from tasks.turns.testing import LIMIT_S, gathered, record_of
from tests.character_turns import STOP, CharacterConversation, said, text_of, walk

pytestmark = pytest.mark.slow
DICE = TurnsConfig(environment="tests.trl_shapes:Dice", processes=1, call_time_limit_s=LIMIT_S, replay=True)
ROLL = '!roll {"sides": 1000000}'


def opened(opening: str | None) -> ProcessEnvironments:
    reset = Reset({}, 1, opening)
    return ProcessEnvironments(DICE, lambda _: CharacterConversation(), [STOP], lambda _: reset, bytes)


def test_an_opening_follows_from_the_groups_seed_though_many_are_reset_side_by_side():
    texts = reset_texts(DICE, [{}] * 24, [1, 2, 3] * 8)
    assert len(set(texts)) == 3
    assert texts == texts[:3] * 8


def test_a_calls_draws_follow_from_its_id():
    (opening,) = reset_texts(DICE, [{}], [1])
    environments = opened(opening)
    try:
        # Of one group: they begin alike, and each has luck of its own.
        environments.begin([said(ROLL, 4), said(ROLL, 5)])
        answers = gathered(environments, 2)
    finally:
        environments.close()
    assert text_of(answers[4]) != text_of(answers[5])
    assert [record_of(answer).diverged for answer in answers.values()] == [False, False]
    assert record_of(answers[4]).calls[0].call_id == call_id(11, 2, 4, 0, 0)
    again = opened(opening)
    try:
        again.begin([said(ROLL, 4)])
        assert text_of(gathered(again, 1)[4]) == text_of(answers[4])
    finally:
        again.close()


def test_a_game_of_chance_goes_on_elsewhere_by_replay():
    (opening,) = reset_texts(DICE, [{}], [1])
    every: list[ProcessEnvironments] = []

    def open_one() -> ProcessEnvironments:
        every.append(opened(opening))
        return every[-1]

    try:
        texts = [ROLL, ROLL, ROLL, "so"]
        undisturbed = walk(open_one, texts, [])
        moved = walk(open_one, texts, [1])
    finally:
        for environments in every:
            environments.close()
    assert [record_of(answer).rebuilt for answer in moved] == ["new", "replayed", "kept", "kept"]
    assert [text_of(answer) for answer in moved] == [text_of(answer) for answer in undisturbed]
    assert len({text_of(answer) for answer in moved[:3]}) == 3
