"""A response as people read it: text in stretches, the process and the end of each stretch, and the rewards."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from storage.journal.response_lookup import Traced
from storage.journal.shard import Finish
from storage.journal.turns import decode_turn
from storage.records.gradings import GradedRecord
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from tasks.prompts.decode import Decode
from tasks.viewing.response_index import ResponseIndex, State, slot_of
from tasks.viewing.token_pieces import stretch_texts

# What became of the process that wrote a stretch which another one continued. lost: it was killed, or fell silent.
# left: it handed over its work, as after a notice. gone: it worked on, and gave this response to a member with less to
# do.
Fate = Literal["lost", "left", "gone"]
StretchEnd = Literal[
    "stop", "length", "running", "released", "acting", "failed", "unused", "killed", "handed over", "taken over"
]
_BY_FATE: dict[Fate, StretchEnd] = {"lost": "killed", "left": "handed over", "gone": "taken over"}
_BY_FINISH: dict[Finish, StretchEnd] = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.RUNNING: "running",
    Finish.RELEASED: "released",
    Finish.ACTING: "acting",
    Finish.FAILED: "failed",
}

NO_GRADINGS: Mapping[str, GradedRecord] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class StretchView:
    """Consecutive tokens of a response by one incarnation.

    Attributes:
        text: Its text; empty without a tokenizer.
        first: The position of its first token, counted from the end of the prompt.
        tokens: How many there are.
        slot: The slot of the incarnation.
        incarnation: The process life that generated them.
        weight_version: The weights that it sampled from.
        end: How it ended. "killed", "handed over" and "taken over": another incarnation continued it.
    """

    text: str
    first: int
    tokens: int
    slot: int
    incarnation: str
    weight_version: int
    end: StretchEnd


@dataclass(frozen=True, kw_only=True)
class CallView:
    """A call of a tool in a turn.

    Attributes:
        turn: The number of the policy's turn in the response, from 0.
        call: The tool and its arguments, as text.
        result: What the policy read.
        outcome: As in storage.journal.turns.CallRecord; " (unknown)" follows if an earlier process may have called.
        seconds: How long it took.
    """

    turn: int
    call: str
    result: str
    outcome: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ResponseView:
    """A response of an iteration for people; texts are as the tokenizer decodes them, special tokens included.

    Attributes:
        iteration: The iteration.
        response: The number of the response in the iteration.
        group: The number of the group.
        sample: The index in the group.
        state: See State.
        prompt_id: The prompt's id.
        prompt: The text that the policy read; without a tokenizer the prompt as stored in the data.
        columns: The other columns of the prompt's row.
        stretches: Text by generating process, in order; empty if the response was not begun.
        calls: Calls of tools, in order; empty in a run without turns.
        tokens: The present number of tokens.
        reward: The weighted sum of the rewards; None if the response is not graded, or failed.
        rewards: By reward function.
        gradings: The reward by each grading of `gleaner regrade` that has the response.
        advantage: As the train step computed it; None if unknown.
        has_text: Whether there is a tokenizer.
    """

    iteration: int
    response: int
    group: int
    sample: int
    state: State
    prompt_id: str
    prompt: str
    columns: dict[str, object]
    stretches: tuple[StretchView, ...]
    calls: tuple[CallView, ...]
    tokens: int
    reward: float | None
    rewards: dict[str, float | None]
    gradings: dict[str, float]
    advantage: float | None
    has_text: bool


def view_response(
    plan: PlanRecord,
    index: ResponseIndex,
    prompt: PromptRow,
    traced: Traced,
    fates: Mapping[str, Fate],
    decode: Decode | None,
    advantage: float | None = None,
    gradings: Mapping[str, GradedRecord] = NO_GRADINGS,
) -> ResponseView:
    """The view of one response.

    fates: what became of each incarnation that has ended. gradings: of the iteration, by name.
    """
    response = traced.response
    graded = {name: record.reward_of(response.response) for name, record in gradings.items()}
    return ResponseView(
        iteration=plan.iteration,
        response=response.response,
        group=response.group,
        sample=response.response % plan.num_generations,
        state=index.states[response.response],
        prompt_id=prompt.prompt_id,
        prompt=prompt_text(prompt, decode),
        columns=prompt.columns,
        stretches=stretches_of(traced, index.states[response.response], fates, decode),
        calls=tuple(calls_of(response.events)),
        tokens=len(response.token_ids),
        reward=response.reward if plan.is_graded else None,
        rewards=response.rewards,
        gradings={name: reward for name, reward in graded.items() if reward is not None},
        advantage=advantage,
        has_text=decode is not None,
    )


def stretches_of(
    traced: Traced, state: State, fates: Mapping[str, Fate], decode: Decode | None
) -> tuple[StretchView, ...]:
    """Return the stretches of a response; no other function turns its tokens into text for people."""
    response, ids = traced.response, traced.response.token_ids.tolist()
    merged: list[tuple[str, int]] = []
    for span, tokens in zip(traced.lineage, response.spans, strict=True):
        # An incarnation may hold a response under several claims, one after another.
        if merged and merged[-1][0] == span.incarnation:
            merged[-1] = span.incarnation, merged[-1][1] + tokens
        else:
            merged.append((span.incarnation, tokens))
    texts = [""] * len(merged) if decode is None else stretch_texts(decode, ids, [tokens for _, tokens in merged])
    views, first = [], 0
    for at, ((incarnation, tokens), text) in enumerate(zip(merged, texts, strict=True)):
        if at + 1 < len(merged):
            end = _BY_FATE[fates.get(incarnation, "gone")]
        else:
            end = "unused" if state == "unused" else _BY_FINISH[response.finish]
        views.append(
            StretchView(
                text=text,
                first=first,
                tokens=tokens,
                slot=slot_of(incarnation),
                incarnation=incarnation,
                weight_version=response.weight_version,
                end=end,
            )
        )
        first += tokens
    return tuple(views)


def calls_of(events: Sequence[bytes]) -> Iterator[CallView]:
    """The calls that the answers to a response's turns tell of."""
    for record in map(decode_turn, events):
        for call in record.calls:
            yield CallView(
                turn=record.turn,
                call=f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}",
                result=call.result,
                outcome=f"{call.outcome} (unknown)" if call.unknown else call.outcome,
                seconds=call.seconds,
            )


def prompt_text(prompt: PromptRow, decode: Decode | None) -> str:
    """What the policy read; without a tokenizer the prompt as it stands in the data."""
    if decode is not None:
        return decode(prompt.token_ids)
    return prompt.prompt if isinstance(prompt.prompt, str) else conversation_text(prompt.prompt)


def conversation_text(messages: Sequence[Mapping[str, object]]) -> str:
    """Chat messages, each with its role before it."""
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
