"""Three of TRL's own examples, unchanged, from a checkout of TRL that a variable names.

Two are scripts, and one stands in the documentation of GRPOTrainer. TRL's wheel has neither. With
TRL_EXAMPLES=/path/to/trl/examples/scripts and trl installed:

    python -m pytest -m peers tests/tasks/turns/test_trl_examples.py
"""

import ast
import os
import re
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from tasks.configuration.turns import TurnsConfig
from tasks.turns.environments import Answer
from tasks.turns.living_environments import Reset
from tasks.turns.opened_environments import ProcessEnvironments, reset_texts
from tasks.turns.testing import LIMIT_S, gathered, record_of
from tests.character_turns import STOP, CharacterConversation, said, text_of, walk

pytestmark = [pytest.mark.peers, pytest.mark.slow]
TOOLS_OF_DOCUMENTATION = ("trl_counter:multiply", "trl_counter:async_add")


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the examples, which this process and its children can import, and a directory to work in."""
    named = os.environ.get("TRL_EXAMPLES")
    if named is None or find_spec("trl") is None:
        pytest.skip("needs trl, and a checkout of it in TRL_EXAMPLES; this file says how")
    root = Path(__file__).parents[3]
    monkeypatch.setattr(sys, "path", [*sys.path, named, str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, [str(root), *sys.path])))
    monkeypatch.chdir(tmp_path)
    return Path(named)


def opened(opening: str | None = None, **settings: object) -> ProcessEnvironments:
    config = TurnsConfig(processes=1, call_time_limit_s=LIMIT_S, **settings)
    reset = Reset({}, 1, opening)
    return ProcessEnvironments(config, lambda _: CharacterConversation(), [STOP], lambda _: reset, bytes)


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


def played(opening: str | None, texts: Sequence[str], cuts: Sequence[int], **settings: object) -> list[Answer]:
    """The answers to these turns; before each turn in `cuts` the process is another one."""
    every: list[ProcessEnvironments] = []

    def open_one() -> ProcessEnvironments:
        every.append(opened(opening, **settings))
        return every[-1]

    try:
        return walk(open_one, texts, cuts)
    finally:
        for environments in every:
            environments.close()


def test_the_game_of_grpo_2048_begins_alike_in_its_group_and_goes_on_elsewhere():
    """It draws from `random` without a seed, in its reset and in its moves."""
    config = TurnsConfig(environment="grpo_2048:Game2048Env")
    boards = reset_texts(config, [{}] * 12, [1, 2, 3] * 4)
    assert all(board is not None and board.startswith("score=0.0\n") for board in boards)
    assert len(set(boards)) == 3
    assert boards == boards[:3] * 4
    moves = [f'!move {{"direction": "{where}"}}' for where in ("left", "up", "left", "up", "right", "down")]
    settings = {"environment": "grpo_2048:Game2048Env", "replay": True}
    undisturbed = played(boards[0], moves, [], **settings)
    moved = played(boards[0], moves, [1, 4], **settings)
    assert [text_of(answer) for answer in moved] == [text_of(answer) for answer in undisturbed]
    assert [record_of(answer).rebuilt for answer in moved] == ["new", "replayed", "kept", "kept", "replayed", "kept"]
    assert all(text_of(answer).startswith("<score=") for answer in moved)


def test_the_counter_of_the_documentation_is_counted_to_its_own_target(examples: Path, tmp_path: Path):
    """Its reset samples the target from `random` without a seed, and says it."""
    _write_example(examples.parents[1] / "docs/source/grpo_trainer.md", tmp_path / "trl_counter.py")
    config = TurnsConfig(environment="trl_counter:IncrementEnv")
    openings = reset_texts(config, [{}] * 8, [1] * 8)
    assert len(set(openings)) == 1
    assert openings[0] is not None
    target = int(openings[0].removeprefix("Increment the counter by ").removesuffix("."))
    texts = ['!increment {"step": 1}'] * target + ["done"]
    settings = {"environment": "trl_counter:IncrementEnv", "tools": TOOLS_OF_DOCUMENTATION, "replay": True}
    answers = played(openings[0], texts, [1, target], **settings)
    assert [text_of(answer) for answer in answers[:-1]] == [f"<{count + 1}>\n" for count in range(target)]
    assert record_of(answers[-1]).reward == 1.0
    (both,) = played(openings[0], ['!multiply {"a": 6, "b": 7}\n!async_add {"a": 6, "b": 7}'], [], **settings)
    assert text_of(both) == "<42><13>\n"


def _write_example(documentation: Path, module: Path) -> None:
    """The classes, functions and `import random` of the sections on agents, without the calls of TRL's trainer."""
    blocks = re.findall(r"^```python\n(.*?)^```", documentation.read_text(), re.DOTALL | re.MULTILINE)
    (tools,) = (block for block in blocks if "async def async_add" in block)
    (counter,) = (block for block in blocks if "class IncrementEnv" in block and "random.randint" in block)
    found = ["import random"]
    for block in (tools, counter):
        found += [
            ast.get_source_segment(block, node) or ""
            for node in ast.parse(block.replace("    ...,\n", "")).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
    module.write_text("\n\n".join(found))
