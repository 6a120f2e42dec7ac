"""Tools and environments that were written for TRL's trainer, unchanged."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from storage.journal.shard import Finish
from tasks.configuration.turns import TurnsConfig
from tasks.turns.living_environments import Reset
from tasks.turns.opened_environments import ProcessEnvironments, reset_texts
from tasks.turns.testing import LIMIT_S, gathered, record_of
from tests.character_turns import STOP, CharacterConversation, said, text_of, walk

pytestmark = pytest.mark.slow
GAME = TurnsConfig(environment="tests.trl_shapes:WordGame", replay=True)
TOOLS = TurnsConfig(
    tools=("tests.trl_shapes:query", "tests.trl_shapes:ponder", "tests.trl_shapes:weather"),
    call_time_limit_s=LIMIT_S,
    processes=1,
)


@pytest.fixture
def opened() -> Iterator[Callable[..., ProcessEnvironments]]:
    every: list[ProcessEnvironments] = []

    def opened(config: TurnsConfig, opening: str | None = None) -> ProcessEnvironments:
        reset = Reset({"answer": "crane"}, 1, opening)
        every.append(ProcessEnvironments(config, lambda _: CharacterConversation(), [STOP], lambda _: reset, bytes))
        return every[-1]

    yield opened
    for environments in every:
        environments.close()


def test_a_tool_may_limit_its_own_time_by_an_alarm(opened: Any):
    environments = opened(TOOLS)
    environments.begin([said(f'!query {{"sql": "select {i}, \'x\'"}}', i) for i in range(6)])
    assert [text_of(answer) for _, answer in sorted(gathered(environments, 6).items())] == [
        f'<[[{i}, "x"]]>\n' for i in range(6)
    ]
    environments.begin([said('!ponder {"seconds": 1000}'), said('!weather {"city": "Bern"}', 1)])
    answers = gathered(environments, 2)
    assert text_of(answers[0]) == "<error: TooLong: stopped after 1 seconds>\n"
    assert text_of(answers[1]) == '<{"city": "Bern", "degrees": 4}>\n'


def test_a_game_is_played_and_goes_on_elsewhere(opened: Any):
    (opening,) = reset_texts(GAME, [{"answer": "crane"}], [1])
    assert opening == "Guess a word of five letters."
    answers = walk(
        lambda: opened(GAME, opening),
        ['!guess {"word": "slate"}', '!guess {"word": "crane"}', '!guess {"word": "crane"}', "done"],
        [1, 3],
    )
    assert [text_of(answer) for answer in answers[:3]] == [
        "< slate: wrong.>\n",
        "< crane: right.>\n",
        "<error: ValueError: Game over.>\n",
    ]
    assert [record_of(answer).rebuilt for answer in answers] == ["new", "replayed", "kept", "replayed"]
    assert (answers[3].finish, record_of(answers[3]).reward) == (Finish.STOP, 1.0)
