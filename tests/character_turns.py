"""A language for turns in which a token is a character: `!name {"json": "arguments"}` is a call, STOP ends a turn."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from storage.journal.shard import Finish
from storage.records.prompt_table import PromptRow
from tasks.turns.environments import Answer, Environments, OpenTurn
from tasks.turns.policy_turn import PolicyTurn, ToolCall
from tasks.turns.testing import answered

STOP = 0
PROMPT = PromptRow("p", (1,), [{"role": "user", "content": "count"}], {"start": 3, "more": "m"})


class CharacterConversation:
    def read(self, token_ids: Sequence[int]) -> PolicyTurn:
        text = "".join(map(chr, token_ids)).removesuffix(chr(STOP))
        return PolicyTurn("", tuple(self._call(line[1:]) for line in text.splitlines() if line.startswith("!")))

    def suffix_ids(self, tool_messages: Sequence[dict[str, Any]]) -> list[int]:
        return [ord(each) for each in "".join(f"<{m['content']}>" for m in tool_messages) + "\n"]

    def _call(self, line: str) -> ToolCall:
        name, _, written = line.partition(" ")
        try:
            return ToolCall(name, json.loads(written or "{}"), None)
        except ValueError as error:
            return ToolCall(name, written, f"the arguments are no JSON: {error}")


def text_of(answer: Answer) -> str:
    return "".join(map(chr, answer.token_ids))


def said(text: str, response: int = 0, *, stopped: bool = True, **changes: Any) -> OpenTurn:
    """A response's first turn, unless `events` and `token_ids` are given."""
    own = tuple(map(ord, text)) + ((STOP,) if stopped else ())
    before = changes.pop("token_ids", ())
    turn = OpenTurn(
        run_seed=11,
        iteration=2,
        group=response // 4,
        response=response,
        epoch=5,
        prompt=PROMPT,
        token_ids=(*before, *own),
        logprobs=(),
        events=(),
        turn_start=len(before),
        room=10_000,
        unknown=False,
        restarts=0,
    )
    return replace(turn, **changes)


def then(turn: OpenTurn, answer: Answer, text: str, **changes: Any) -> OpenTurn:
    """The turn that follows an answer."""
    assert answer.finish is Finish.RUNNING
    before = (*turn.token_ids, *answer.token_ids)
    events = (*turn.events, answer.event)
    rest = {"events": events, "token_ids": before, "restarts": turn.restarts, **changes}
    return said(text, turn.response, **rest)


def walk(open_environments: Callable[[], Environments], texts: Sequence[str], cuts: Sequence[int]) -> list[Answer]:
    """Answers to turns of one response; before each turn in `cuts` another incarnation takes the response over."""
    environments, answers, turn = open_environments(), [], said(texts[0])
    for number, text in enumerate(texts):
        if number:
            turn = then(turn, answers[-1], text)
        if number in cuts:
            environments = open_environments()
        answers.append(answered(environments, turn))
    return answers
