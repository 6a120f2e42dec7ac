"""Tools and environments in child processes that end with the test, and what they have noted."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.turns.opened_environments import ProcessEnvironments
from tests.character_turns import STOP, CharacterConversation
from tests.opened_tools import RESET, Open, config, no_objects


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What tools have noted, without the numbers of their processes."""
    path = tmp_path / "notes"
    path.touch()
    monkeypatch.setenv("TOOL_NOTES", str(path))
    return lambda: [line.partition(" ")[2] for line in path.read_text().splitlines()]


@pytest.fixture
def opened(notes: Callable[[], list[str]]) -> Iterator[Open]:
    every: list[ProcessEnvironments] = []

    def opened(*tools: str, reset: Any = RESET, read_object: Any = no_objects, **settings: Any) -> Any:
        every.append(
            ProcessEnvironments(
                config(*tools, **settings), lambda _: CharacterConversation(), [STOP], lambda _: reset, read_object
            )
        )
        return every[-1]

    yield opened
    for environments in every:
        environments.close()
