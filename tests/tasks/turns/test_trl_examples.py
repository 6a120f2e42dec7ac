"""The tool and the environment of two of TRL's own examples, unchanged, from a checkout of TRL that a variable names.

TRL's wheel has no examples. With TRL_EXAMPLES=/path/to/trl/examples/scripts and trl installed:

    python -m pytest -m peers tests/tasks/turns/test_trl_examples.py
"""

import os
import sqlite3
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks.configuration.turns import TurnsConfig
from tasks.turns.living_environments import Reset
from tasks.turns.process_environments import ProcessEnvironments, reset_texts
from tests.character_turns import LIMIT_S, STOP, CharacterConversation, answered, gathered, said, text_of

pytestmark = [pytest.mark.peers, pytest.mark.slow]


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the examples, which this process and its children can import, and a directory to work in."""
    named = os.environ.get("TRL_EXAMPLES")
    if named is None or find_spec("trl") is None:
        pytest.skip("needs trl, and a checkout of it in TRL_EXAMPLES; this file says how")
    root = Path(__file__).parents[3]
    monkeypatch.setattr(sys, "path", [*sys.path, named])
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, [str(root), *sys.path])))
    monkeypatch.chdir(tmp_path)
    return Path(named)


def opened(opening: str | None = None, **settings: object) -> ProcessEnvironments:
    config = TurnsConfig(processes=1, load_time_limit_s=LIMIT_S, call_time_limit_s=LIMIT_S, **settings)
    reset = Reset({}, 1, opening)
    return ProcessEnvironments(config, CharacterConversation(), [STOP], lambda _: reset, bytes)


def test_the_database_tool_of_grpo_agent_answers():
    with closing(sqlite3.connect("biogrid.db")) as connection, connection:
        connection.execute("create table interactions (a, b)")
        connection.execute("insert into interactions values ('JNKK', 9606)")
    environments = opened(tools=("grpo_agent:query_biogrid",))
    try:
        statements = ["select * from interactions where b = 9606", "delete from interactions", "select missing"]
        environments.begin([said(f'!query_biogrid {{"sql_command": "{sql}"}}', i) for i, sql in enumerate(statements)])
        answers = gathered(environments, len(statements))
    finally:
        environments.close()
    assert text_of(answers[0]) == '<[["JNKK", 9606]]>\n'
    assert "readonly" in text_of(answers[1])
    assert "no such column" in text_of(answers[2])


def test_the_game_of_grpo_2048_plays_but_its_group_has_no_common_beginning():
    """Its reset draws from `random` without a seed, so a member's board is not the one of the plan."""
    config = TurnsConfig(environment="grpo_2048:Game2048Env", load_time_limit_s=LIMIT_S)
    boards = reset_texts(config, [{}] * 8, [1] * 8)
    assert all(board is not None and board.startswith("score=0.0\n") for board in boards)
    assert len(set(boards)) > 1
    environments = opened("another board", environment="grpo_2048:Game2048Env", attempts_max=1)
    try:
        answer = answered(environments, said('!move {"direction": "left"}'))
    finally:
        environments.close()
    assert b"another text than when the iteration was planned" in answer.event
