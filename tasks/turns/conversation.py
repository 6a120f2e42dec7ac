"""Conversations in tokens: prompts with tools, the tokens of tool results, and what the policy wrote.

Nothing that was sampled is ever tokenised again. The tokens that follow a turn come from a dummy conversation, which
goes through the chat template without and with the new messages: the tokens after the dummy turn's stop token are
taken. The method is right only for a template whose beginning does not change when messages follow, so `check` refuses
any other template.
"""

import logging
from collections.abc import Collection, Sequence
from typing import Any

from storage.journal.turns import decode_turn
from tasks.prompts.prompt import PromptError
from tasks.turns.own_template import Message, in_plain_messages
from tasks.turns.policy_turn import PolicyTurn, Reader, read_gemma, read_parsed, read_tagged, unreadable
from tasks.turns.tool_schemas import Schema, name_of

log = logging.getLogger(__name__)
_ASKED: Message = {"role": "user", "content": "dummy"}
_MARK = "7310946582"  # digits, which every tokenizer has
_REASON_CHARACTERS_MAX = 300


class TemplateError(PromptError):
    """The model's chat template cannot be used with tools."""


class Conversation:
    """The chat template of a tokenizer with the tools of a run."""

    def __init__(
        self,
        tokenizer: Any,
        schemas: Sequence[Schema],
        stop_token_ids: Collection[int] = (),
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        """tokenizer: one of transformers. stop_token_ids: those of the run; the tokenizer's own is always one.

        skip_special_tokens: the content of a turn has no special tokens.
        """
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._schemas = tuple(schemas)
        self._stops = {int(token) for token in (*stop_token_ids, tokenizer.eos_token_id) if token is not None}
        self._template = getattr(tokenizer, "response_template", None)
        self._is_ours = bool(self._schemas) and not self._knows_tools()
        self._prefix: str | None = None

    @property
    def tools(self) -> tuple[Schema, ...]:
        """The schemas of the run's tools."""
        return self._schemas

    def check(self) -> None:
        """Raise TemplateError if the template does not fit tools; log a line if calls are told as text instead."""
        if not self._tokenizer.chat_template:
            raise TemplateError("policy.path: the tokenizer has no chat template; allowed with turns: one that has")
        names = list(map(name_of, self._schemas))
        self._tried([_ASKED], asks=True)
        if names:
            self.suffix_ids([{"role": "tool", "name": name, "content": _MARK} for name in names[:2]])
        if self._template is not None:
            try:
                self._parsed("dummy")
            except Exception as error:
                reason = f"the tokenizer's response_template cannot be used: {_line(error)}"
                raise TemplateError(f"policy.path: {reason}") from error
        if self._is_ours:
            log.warning("the model's chat template knows no tools; they are told to the policy as text, as for Qwen")

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a prompt, tools and generation prompt included; raises what the template raises."""
        return self._rendered(messages, asks=True)

    def prompt_text(self, messages: Sequence[Message], *, asks: bool) -> str:
        """The text of a prompt with the tools, and with the generation prompt if it asks; raises as `prompt_ids`."""
        return str(self._applied(messages, asks=asks, tokenize=False))

    def suffix_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens after the policy's stop token, for messages {"role": "tool", "name", "content"}, or others.

        The generation prompt is included. Raises TemplateError for a template that does not preserve prefixes.
        """
        calls = [_call(message["name"], {}) for message in messages if message["role"] == "tool"]
        turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        spoken = [_ASKED, turn if calls else {"role": "assistant", "content": "dummy"}]
        alone, followed = self._tried(spoken, asks=False), self._tried([*spoken, *messages], asks=True)
        begun = _shared(self._tried([_ASKED], asks=True), followed)
        shared = _shared(alone, followed)
        ends = (place for place in range(begun, len(followed)) if followed[place] in self._stops)
        end = next(ends, len(followed))
        # A template may end the turn only when results follow, so the stop token itself may be the first difference.
        if end > shared or end == len(followed):
            raise TemplateError(
                "policy.path: the chat template does not preserve prefixes: the tokens of a conversation up to a turn "
                "of the assistant change when messages follow; allowed with turns: one that preserves them, and "
                f"that ends a turn with a stop token ({', '.join(map(str, sorted(self._stops)))})"
            )
        return followed[end + 1 :]

    def read(self, token_ids: Sequence[int]) -> PolicyTurn:
        """A turn of the policy, with its stop token or without; nothing that a policy writes raises."""
        text = self._decoded(token_ids, skips=False)
        if self._template is not None:
            return self._read_by_template(text)
        turn = self._reader()(text, self._schemas)
        if not self._skips:
            return turn
        content = turn.content
        for special in self._tokenizer.all_special_tokens:
            content = content.replace(special, "")
        return PolicyTurn(content, turn.calls)

    def text(self, token_ids: Sequence[int]) -> str:
        """A turn of the policy, with its stop token or without, as text without calls."""
        return self._decoded(token_ids, skips=self._skips).strip()

    def messages(
        self, prompt: Sequence[Message], token_ids: Sequence[int], origins: Sequence[int], events: Sequence[bytes]
    ) -> list[Message]:
        """The whole conversation as chat messages: the prompt's, then the assistant's and the tools' in turn.

        token_ids, origins, events: of the response, as in storage.journal.assembly.Assembled. An assistant's message
        has `content`, `tool_calls` if there are any, and `thinking` if the model's response template sets it apart; a
        tool's has `name` and `content`.
        """
        found, place = list(prompt), 0
        for stretch, length in enumerate(origins):
            ids, place = token_ids[place : place + length], place + length
            if stretch % 2 or not length:
                continue
            found.append(_assistant(self.read(ids)))
            if stretch // 2 < len(events):
                calls = decode_turn(events[stretch // 2]).calls
                found += [{"role": "tool", "name": call.name, "content": call.result} for call in calls]
        return found

    def _decoded(self, token_ids: Sequence[int], *, skips: bool) -> str:
        ids = [int(token) for token in token_ids]
        if ids and ids[-1] in self._stops:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=skips))

    def _reader(self) -> Reader:
        return read_gemma if not self._is_ours and "<|tool_call>" in str(self._tokenizer.chat_template) else read_tagged

    def _read_by_template(self, text: str) -> PolicyTurn:
        try:
            return read_parsed(self._parsed(text), self._schemas)
        except Exception as error:  # noqa: BLE001 - a template is the model's author's, and the text is the policy's
            return unreadable(text, _line(error))

    def _parsed(self, text: str) -> dict[str, Any]:
        """The message that the response template makes of a turn; raises what the template raises."""
        if self._prefix is None:
            self._prefix = str(self._tokenizer.decode(list(self.prompt_ids([_ASKED]))))
        message: dict[str, Any] = self._tokenizer.parse_response(text, prefix=self._prefix, tools=list(self._schemas))
        return message

    def _knows_tools(self) -> bool:
        """Whether the template shows results of tools; the tools, too, unless a `response_template` reads the calls."""
        spoken = [_ASKED, {"role": "assistant", "content": "", "tool_calls": [_call("dummy", {})]}]
        answered: list[Message] = [*spoken, {"role": "tool", "name": "dummy", "content": _MARK}]
        try:
            shows_results = _MARK in self._text(answered, self._schemas)
            shows_tools = self._text([_ASKED], self._schemas) != self._text([_ASKED], ())
        except Exception:  # noqa: BLE001 - how a template refuses the role `tool` is its author's choice
            return False
        return shows_results and (shows_tools or self._template is not None)

    def _text(self, messages: Sequence[Message], schemas: Sequence[Schema]) -> str:
        return str(self._tokenizer.apply_chat_template(list(messages), tools=list(schemas) or None, tokenize=False))

    def _tried(self, messages: Sequence[Message], *, asks: bool) -> tuple[int, ...]:
        try:
            return self._rendered(messages, asks=asks)
        except Exception as error:
            raise TemplateError(
                f"policy.path: the chat template refuses a conversation with tools: {_line(error)}"
            ) from error

    def _rendered(self, messages: Sequence[Message], *, asks: bool) -> tuple[int, ...]:
        return tuple(int(token) for token in self._applied(messages, asks=asks, tokenize=True))

    def _applied(self, messages: Sequence[Message], *, asks: bool, tokenize: bool) -> Any:
        tools: list[Schema] | None = list(self._schemas)
        given = list(messages)
        if self._is_ours:
            given, tools = in_plain_messages(given, self._schemas), None
        return self._tokenizer.apply_chat_template(
            given, tools=tools, add_generation_prompt=asks, tokenize=tokenize, return_dict=False
        )


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _assistant(turn: PolicyTurn) -> Message:
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.thinking is not None:
        message["thinking"] = turn.thinking
    if turn.calls:
        message["tool_calls"] = [_call(call.name, call.arguments) for call in turn.calls]
    return message


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_CHARACTERS_MAX]
