"""The policy's language for agents, whose requests bring their own tools."""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from storage.journal.turns import added_messages, decode_turn
from tasks.turns.conversation import Conversation
from tasks.turns.own_template import Message
from tasks.turns.policy_turn import PolicyTurn, ToolCall
from tasks.turns.tool_schemas import Schema, name_of

_KEPT_MAX = 64


@dataclass(frozen=True, slots=True)
class Spoken:
    """A turn of the policy as an agent reads the turn, and as a message of the conversation.

    Attributes:
        content: the text without calls and thoughts.
        thinking: the thought that the model's response template sets apart; None: no thought.
        calls: the calls, some of which may have a problem.
    """

    content: str
    thinking: str | None
    calls: tuple[ToolCall, ...]

    @property
    def message(self) -> Message:
        """The turn as a message, in the form that chat_request gives to a message from an agent."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


class AgentLanguage:
    """A tokenizer with whatever tools a request brings; several threads may use it."""

    def __init__(
        self, tokenizer: Any, stop_token_ids: Collection[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """tokenizer: one of transformers. stop_token_ids, skip_special_tokens: as in Conversation."""
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._skip_special_tokens = skip_special_tokens
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        # A tokenizer of transformers refuses a second thread while it encodes.
        self._lock = threading.Lock()

    def check(self, tools: Sequence[Schema] = ()) -> None:
        """Raise TemplateError if the model's chat template does not fit these tools."""
        with self._lock:
            self._conversation(tools).check()

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Schema]) -> tuple[int, ...]:
        """The tokens of a conversation's first request; raises what the template raises."""
        with self._lock:
            return self._conversation(tools).prompt_ids(messages)

    def suffix_ids(self, added: Sequence[Message], tools: Sequence[Schema]) -> tuple[int, ...]:
        """The tokens of the messages that follow a turn; raises TemplateError."""
        with self._lock:
            return self._conversation(tools).suffix_ids(added)

    def spoken(self, token_ids: Sequence[int], tools: Sequence[Schema]) -> Spoken:
        """A turn of the policy, with its stop token or without. An unreadable call is text."""
        with self._lock:
            # Whether the arguments fit is for the agent to say.
            conversation = self._conversation([_without_rules(tool) for tool in tools])
            turn: PolicyTurn = conversation.read(token_ids)
            if all(call.name for call in turn.calls):
                return Spoken(turn.content, turn.thinking, turn.calls)
            return Spoken(conversation.text(token_ids), None, ())

    def pieces(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """The text of each token."""
        with self._lock:
            return tuple(str(self._tokenizer.decode([token])) for token in token_ids)

    def messages(
        self, tools: Sequence[Schema], token_ids: Sequence[int], origins: Sequence[int], events: Sequence[bytes]
    ) -> list[Message]:
        """The messages of a response, the policy's and the agent's in turn.

        token_ids, origins, events: as in storage.journal.assembly.Assembled.
        """
        found: list[Message] = []
        place = 0
        for stretch, length in enumerate(origins):
            ids, place = token_ids[place : place + length], place + length
            if stretch % 2 or not length:
                continue
            turn = self.spoken(ids, tools)
            found.append(turn.message | ({} if turn.thinking is None else {"thinking": turn.thinking}))
            if stretch // 2 < len(events):
                found += added_messages(decode_turn(events[stretch // 2]))
        return found

    def _conversation(self, tools: Sequence[Schema]) -> Conversation:
        name = json.dumps(list(tools))
        if name not in self._kept:
            self._kept[name] = Conversation(
                self._tokenizer, tools, self._stop_token_ids, skip_special_tokens=self._skip_special_tokens
            )
        self._kept.move_to_end(name)
        while len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)
        return self._kept[name]


def _without_rules(tool: Schema) -> Schema:
    """The tool with no more than the names and kinds of its parameters, by which written values are read."""
    given = tool["function"]["parameters"]["properties"]
    kinds = {key: value.get("type") if isinstance(value, dict) else None for key, value in given.items()}
    properties = {key: {"type": kind} if isinstance(kind, str) else {} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name_of(tool), "parameters": parameters}}
