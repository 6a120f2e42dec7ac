"""Comparison of prompts with their rows: does the policy read the text of the row?

Prompts are decoded from tokens, so a comparison finds losses by the chat template and by the tokenizer alike. Only if
texts differ is a row rendered once more, to tell whether template or tokenizer lost the text.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from storage.records.prompt_table import PromptRow
from tasks.configuration.data import DataConfig
from tasks.prompts.differences import Differences
from tasks.prompts.order import prompt_index
from tasks.prompts.prompt import Message, PromptSet
from tasks.prompts.rendering import ARGUMENTS, TOOLS, arguments_of, names_tools, rendering, tools_of
from tasks.prompts.shown_text import is_kept, lost_characters, missing, shown_share, spoken
from tasks.prompts.tokenise import AgentTokenizer, Tokenizer
from tasks.prompts.written_values import holds_messages, read_value

DECODED_AT_ONCE = 512
_MARK = "7310946582"  # digits, which every tokenizer has
_HALF = 0.5


def compare(
    rows: Sequence[PromptRow],
    prompts: PromptSet,
    tokenizer: Tokenizer,
    decoder: Any,
    data: DataConfig,
    stops: Collection[int],
    section: str = "data",
) -> list[str]:
    """Return doubts about the prompts at running positions 0, 1, ...: a line for each kind that is not allowed.

    Args:
        rows: The tokenised prompts.
        prompts: The prompts of the rows.
        tokenizer: The tokenizer that made the rows.
        decoder: The tokenizer of transformers behind `tokenizer`.
        data: The section of the configuration.
        stops: The ids that end a response.
        section: The name of the section, for messages.

    Raises:
        PromptError: A prompt is certainly wrong.
    """
    if isinstance(tokenizer, AgentTokenizer):  # the policy reads an agent's request instead
        return []
    found = Differences(section, data.allow, len(rows))
    comparison = _Comparison(found, tokenizer, decoder, data, stops)
    for position, (row, text) in enumerate(_decoded(rows, decoder)):
        found.look(partial(place_of, prompts, data, position))
        comparison.look_at(row, text)
    return found.doubts()


def place_of(prompts: PromptSet, data: DataConfig, position: int) -> str:
    """Where the prompt at a running position stands, for messages."""
    return prompts.place(prompt_index(position, len(prompts), data.seed, data.shuffle)[1])


def _decoded(rows: Sequence[PromptRow], decoder: Any) -> Iterator[tuple[PromptRow, str]]:
    """The rows with the texts of their tokens."""
    for first in range(0, len(rows), DECODED_AT_ONCE):
        some = rows[first : first + DECODED_AT_ONCE]
        yield from zip(some, decoded_texts([row.token_ids for row in some], decoder), strict=True)


def decoded_texts(token_ids: Iterable[Sequence[int]], decoder: Any) -> list[str]:
    """The text of each, special tokens included. decoder: a tokenizer of transformers."""
    given = [list(ids) for ids in token_ids]
    texts: list[str] = decoder.batch_decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return texts


class _Comparison:
    """Compares row by row; trials that depend on the chat template alone are made once."""

    def __init__(
        self, found: Differences, tokenizer: Tokenizer, decoder: Any, data: DataConfig, stops: Collection[int]
    ) -> None:
        self._found = found
        self._tokenizer = tokenizer
        self._data = data
        self._bos = decoder.bos_token_id
        self._stops = {*stops, *(() if decoder.eos_token_id is None else (decoder.eos_token_id,))}
        self._stop_texts = tuple(filter(None, (decoder.decode([stop]).strip() for stop in sorted(self._stops))))
        self._specials = {str(token) for token in decoder.added_tokens_decoder.values()}
        # Of a tokenizer that takes none of a row's arguments there is no template here.
        self._template = str(getattr(tokenizer, "chat_template", None) or "")
        # What was tried of a template with rows of one kind; tools that were found in a prompt are few, too.
        self._tried: dict[str, tuple[str, bool] | None] = {}

    def look_at(self, row: PromptRow, decoded: str) -> None:
        """Add the differences between a row and the text of its tokens."""
        ids, found = row.token_ids, self._found
        if self._bos is not None and ids[0] == self._bos and self._bos in ids[1:3]:
            found.add("two_bos", "the prompt begins with two BOS tokens", certain=True)
        if isinstance(row.columns.get("extra_info"), str) and isinstance(
            read_value(row.columns["extra_info"]), Mapping
        ):
            found.add("json_as_text", "the column extra_info is text that holds an object", certain=False)
        if isinstance(row.prompt, str):
            self._look_at_text(row, row.prompt, decoded)
        else:
            self._look_at_messages(row, row.prompt, decoded)

    def _look_at_text(self, row: PromptRow, text: str, decoded: str) -> None:
        if holds_messages(text):
            self._found.add("json_as_text", "the prompt is text that holds chat messages", certain=True)
        self._look_at_end(row, text)
        if not is_kept(text, decoded, self._specials):
            self._add_lost(text, decoded)
        if tools_of(row.columns):
            self._found.add(
                "unread_arguments", f"the prompt is text, so the column {TOOLS} is not shown", certain=False
            )
        if arguments_of(row.columns, self._data):
            self._found.add("unread_arguments", f"the prompt is text, so {ARGUMENTS} are not read", certain=False)

    def _look_at_end(self, row: PromptRow, text: str | None) -> None:
        """Add a difference if the prompt ends with a stop token. text: the prompt's text; final blanks do not count."""
        ends = len(row.token_ids) > 1 and row.token_ids[-1] in self._stops
        if ends or (text is not None and text.rstrip().endswith(self._stop_texts)):
            self._found.add("stop_token_at_end", "the prompt ends with a token that ends a response", certain=True)

    def _look_at_messages(self, row: PromptRow, messages: list[Message], decoded: str) -> None:
        by_assistant = messages[-1]["role"] == "assistant"
        if by_assistant and not self._data.continue_final_message:
            self._found.add(
                "assistant_last",
                "the last message is the assistant's, so the prompt may hold the answer, and a new message follows it",
                certain=True,
            )
        self._look_at_end(row, None)
        absent, rest = missing([spoken(message["role"], message["content"]) for message in messages], decoded)
        names = [name for message in messages for name in called(message)]
        unnamed = [name for name in names if name not in decoded]
        if absent or unnamed:
            self._explain(row, messages, decoded)
        for message in messages:
            self._look_at_json(message, rest)
        self._look_at_arguments(row, decoded)
        if not by_assistant:
            self._try_template(row, messages, decoded)

    def _explain(self, row: PromptRow, messages: list[Message], decoded: str) -> None:
        """Add the text that the tokens do not show, as dropped by the template or by the tokenizer."""
        text = self._text(row, messages)
        contents = [spoken(message["role"], message["content"]) for message in messages]
        absent, rest = missing(contents, text)
        shares = {number: shown_share(contents[number], rest) for number in absent}
        for number, share in shares.items():
            if share < 1:
                role = messages[number]["role"]
                detail = f"message {number} (role {role}) is not in the prompt as it is written"
                self._found.add("dropped_message", detail, certain=role == "user" and share < _HALF)
        for number, message in enumerate(messages):
            for name in called(message):
                if name not in text:
                    detail = f"message {number} calls {name!r}, and the prompt does not show it"
                    self._found.add("dropped_message", detail, certain=False)
        if not is_kept(text, decoded, self._specials):
            self._add_lost(text, decoded)

    def _add_lost(self, text: str, decoded: str) -> None:
        lost = lost_characters(text, decoded)
        detail = f"the tokens of the prompt stand for another text, because the tokenizer drops or changes {lost}"
        self._found.add("dropped_characters", detail, certain=False)

    def _look_at_json(self, message: Message, rest: str) -> None:
        if holds_messages(message["content"]):
            detail = "the content of a message is text that holds chat messages"
            self._found.add("json_as_text", detail, certain=False)
        for call in message.get("tool_calls") or ():
            arguments = _function(call).get("arguments")
            if isinstance(arguments, str) and '"' in arguments and json.dumps(arguments) in rest:
                detail = "the arguments of a tool call are text, which the chat template shows as JSON in JSON"
                self._found.add("json_as_text", detail, certain=False)

    def _look_at_arguments(self, row: PromptRow, decoded: str) -> None:
        if names_tools(row.columns):
            tools = tools_of(row.columns)
            unread = [name for name in map(_tool_name, tools) if name not in decoded]
            if unread or not tools:
                what = f"the tool {unread[0]!r} of" if unread else "what stands in"
                detail = f"{what} the column {TOOLS} is not in the prompt"
                self._found.add("unread_arguments", detail, certain=False)
        for name in arguments_of(row.columns, self._data):
            if name not in self._template:
                detail = f"{ARGUMENTS} has {name!r}, which the chat template does not read"
                self._found.add("unread_arguments", detail, certain=False)

    def _try_template(self, row: PromptRow, messages: list[Message], decoded: str) -> None:
        """Try, once for rows of a kind, whether the template adds a generation prompt and the tokenizer keeps it."""
        arguments = arguments_of(row.columns, self._data)
        kind = json.dumps([messages[-1]["role"], bool(tools_of(row.columns)), arguments])
        if kind not in self._tried:
            asking = self._text(row, messages)
            self._tried[kind] = self._without_question(row, messages, asking)
            if not is_kept(asking, decoded, self._specials):
                self._add_lost(asking, decoded)
        if (found := self._tried[kind]) is not None:
            detail, certain = found
            self._found.add("no_generation_prompt", detail, certain=certain)

    def _without_question(self, row: PromptRow, messages: list[Message], asking: str) -> tuple[str, bool] | None:
        """The problem with the end of `asking`, a prompt's text, and whether it is certain; None without a problem.

        A template whose questions end where answers begin needs no generation prompt. After results of tools, some
        templates add no generation prompt, because the assistant's turn goes on.
        """
        answer: Message = {"role": "assistant", "content": _MARK}
        try:
            if self._text(row, messages, add_generation_prompt=False) != asking:
                return None
            answered = self._text(row, [*messages, answer], add_generation_prompt=False)
        except Exception:  # noqa: BLE001 - how a template refuses these is its author's choice
            return None
        before, mark, _ = answered.partition(_MARK)
        asked = spoken("user", messages[-1]["content"])
        ends, begins = (text.rpartition(asked)[2].rstrip() if asked else text.rstrip() for text in (asking, before))
        if mark and begins == ends:
            return None
        is_header = messages[-1]["role"] == "user" and begins.startswith(ends)
        detail = "the chat template adds no generation prompt, so the policy would have to begin the assistant's turn"
        return detail, is_header

    def _text(self, row: PromptRow, messages: list[Message], **how: Any) -> str:
        """The chat template's text of messages with a row's tools and arguments; raises the template's errors."""
        asked = rendering(messages, row.columns, self._data) | how
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, return_dict=False, **asked))


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a call or tool, in OpenAI's nested form or the flat form."""
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def called(message: Message) -> list[str]:
    """The names of the functions that a message calls."""
    return [str(_function(call).get("name") or "") for call in message.get("tool_calls") or ()]


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(_function(tool).get("name") or "")
