"""Conversations of agents in the language of a small chat model: what a member would hand to their environments."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from storage.journal.shard import Finish
from storage.records.prompt_table import PromptRow
from tasks.configuration.turns import TurnsConfig
from tasks.turns.agent_language import AgentLanguage
from tasks.turns.environments import Answer, OpenTurn
from tasks.turns.first_request import read_opening
from tasks.turns.living_environments import Reset
from tasks.turns.opened_environments import AgentEnvironments, first_requests
from tasks.turns.testing import LIMIT_S
from tests.chat_tokenizers import QWEN, chat_tokenizer, written

TOKENIZER = chat_tokenizer(QWEN)
STOP = TOKENIZER.eos_token_id
ASKED = [{"role": "user", "content": "add"}]
SEED = 99


def config(agent: str, **settings: Any) -> TurnsConfig:
    limits = {"processes": 1, "call_time_limit_s": LIMIT_S}
    module = "tests.agent_functions" if ":" not in agent else ""
    return TurnsConfig(**limits | {"agent": f"{module}:{agent}" if module else agent} | settings)


@dataclass
class Talk:
    """The beginning of a conversation with an agent, as a plan makes it, and what a test opens for it."""

    turns: TurnsConfig
    columns: dict[str, Any]
    language: AgentLanguage = field(default_factory=lambda: AgentLanguage(TOKENIZER))
    opened: list[AgentEnvironments] = field(default_factory=list)

    def __post_init__(self) -> None:
        reset = {"prompt": ASKED, **self.columns}
        (opening,) = first_requests(self.turns, [reset], [SEED])
        first = read_opening(opening)
        ids = self.language.prompt_ids(first.messages, first.tools)
        self.prompt = PromptRow("p", ids, ASKED, self.columns, opening)

    def environments(self) -> AgentEnvironments:
        """Those of a new incarnation."""
        reset = Reset({"prompt": ASKED, **self.columns}, SEED, self.prompt.opening)
        self.opened.append(AgentEnvironments(self.turns, self.language, [STOP], lambda _: reset))
        return self.opened[-1]

    def said(self, text: str, response: int = 0, *, stopped: bool = True, **changes: Any) -> OpenTurn:
        """A response's first turn, unless `events`, `token_ids` and `logprobs` are given."""
        own = (*written(TOKENIZER, text), *([STOP] if stopped else []))
        before, logprobs = changes.pop("token_ids", ()), changes.pop("logprobs", ())
        turn = OpenTurn(
            run_seed=11,
            iteration=2,
            group=0,
            response=response,
            epoch=5,
            prompt=self.prompt,
            token_ids=(*before, *own),
            logprobs=(*logprobs, *(-0.5 - place for place in range(len(own)))),
            events=(),
            turn_start=len(before),
            room=10_000,
            unknown=False,
            restarts=0,
        )
        return replace(turn, **changes)

    def then(self, turn: OpenTurn, answer: Answer, text: str, **changes: Any) -> OpenTurn:
        """The turn that follows an answer."""
        assert answer.finish is Finish.RUNNING, answer
        before = {"token_ids": (*turn.token_ids, *answer.token_ids), "logprobs": turn.logprobs}
        rest = {"events": (*turn.events, answer.event), "restarts": turn.restarts}
        return self.said(text, turn.response, **before, **rest, **changes)


@contextmanager
def talk(agent: str, columns: dict[str, Any] | None = None, **settings: Any) -> Iterator[Talk]:
    """A talk whose environments are closed at the end."""
    begun = Talk(config(agent, **settings), columns or {})
    try:
        yield begun
    finally:
        for environments in begun.opened:
            environments.close()


def called(*calls: tuple[int, int]) -> str:
    """A turn that calls the tool `add`."""
    return "".join(
        f'<tool_call>\n{{"name": "add", "arguments": {json.dumps({"a": a, "b": b})}}}\n</tool_call>' for a, b in calls
    )


def noted(path: Path) -> Callable[[], list[Any]]:
    """What agents have noted since the last call."""
    place = 0

    def lines() -> list[Any]:
        nonlocal place
        found = path.read_text().splitlines() if path.exists() else []
        new, place = found[place:], len(found)
        return [json.loads(line) for line in new]

    return lines


def text_of(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids)))
