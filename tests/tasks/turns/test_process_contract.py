"""Child processes keep the contract of environments."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.configuration.turns import TurnsConfig
from tasks.turns.environments import OpenTurn
from tasks.turns.living_environments import Reset
from tasks.turns.opened_environments import ProcessEnvironments
from tasks.turns.testing import LIMIT_S, EnvironmentsContract, Told
from tests.character_turns import STOP, CharacterConversation, said, then


class ToldToProcesses(Told):
    def __init__(self) -> None:
        self.opened: list[ProcessEnvironments] = []

    def environments(self, *, rebuilds: bool = True) -> ProcessEnvironments:
        config = TurnsConfig(
            environment=f"tests.tool_functions:{'Stateful' if rebuilds else 'Counter'}",
            tools=("tests.tool_functions:add",),
            side_effects=("add",),
            processes=2,
            call_time_limit_s=LIMIT_S,
        )
        reset = Reset({"start": 3}, 99, "from 3")
        self.opened.append(
            ProcessEnvironments(config, lambda _: CharacterConversation(), [STOP], lambda _: reset, bytes)
        )
        return self.opened[-1]

    def calling(self, response: int) -> OpenTurn:
        return said(f'!count {{"n": {response}}}', response)

    def calling_again(self, turn: OpenTurn, answer: Any) -> OpenTurn:
        return then(turn, answer, '!count {"n": 2}')

    def ending(self, turn: OpenTurn, answer: Any) -> OpenTurn:
        return then(turn, answer, "done")

    def with_side_effect(self, response: int) -> OpenTurn:
        return said('!add {"a": 1, "b": 2}', response)


@pytest.mark.slow
class TestProcessEnvironments(EnvironmentsContract):
    @pytest.fixture
    def told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
        monkeypatch.setenv("TOOL_NOTES", str(tmp_path / "notes"))
        told = ToldToProcesses()
        yield told
        for environments in told.opened:
            environments.close()
