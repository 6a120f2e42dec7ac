"""Comparison of completions with their rows: does the policy learn the text of the row?

As with prompts, learned tokens are decoded, so a comparison finds losses by the chat template and by the tokenizer
alike. Only if texts differ is a message rendered once more, to tell whether template or tokenizer lost the text.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from storage.records.prompt_table import PromptRow
from tasks.configuration.data import DataConfig
from tasks.prompts.differences import Differences
from tasks.prompts.examples import ASSISTANT, Stretch, completion_name
from tasks.prompts.prompt import Message
from tasks.prompts.rendering import rendering
from tasks.prompts.row_comparison import DECODED_AT_ONCE, called, decoded_texts
from tasks.prompts.shown_text import is_kept, lost_characters, shown_share
from tasks.prompts.tokenise import Tokenizer

# The fields of a message whose texts the policy is to learn: the answer, and reasoning by its names in templates.
_LEARNED = ("content", "reasoning_content", "thinking")


@dataclass(frozen=True, slots=True)
class _Said:
    """A learned stretch beside what its row says.

    Attributes:
        row: The example.
        position: The place of the example among all.
        column: The column of the completion.
        message: The number of the message in the completion; None: the completion is text.
        token_ids: The learned tokens.
    """

    row: PromptRow
    position: int
    column: str
    message: int | None
    token_ids: tuple[int, ...]


def compare_completions(
    made: Iterable[tuple[PromptRow, Sequence[Sequence[Stretch]]]],
    columns: Sequence[str],
    count: int,
    place: Callable[[int], str],
    *,
    tokenizer: Tokenizer,
    data: DataConfig,
) -> list[str]:
    """Return doubts about the completions of examples: a line for each kind that is not allowed.

    Args:
        made: The examples, each with its completions by stretches.
        columns: The columns of the completions, in their order.
        count: The number of examples.
        place: Where the example at a position stands, for messages.
        tokenizer: The tokenizer of transformers that made the tokens.
        data: The section of the configuration.
    """
    found = Differences("data", data.allow, count)
    comparison = _Comparison(found, tokenizer, data)
    last = -1
    learned = _learned(made, columns)
    while some := tuple(islice(learned, DECODED_AT_ONCE)):
        for said, decoded in zip(some, decoded_texts([each.token_ids for each in some], tokenizer), strict=True):
            if said.position != last:
                last = said.position
                found.look(partial(place, last))
            comparison.look_at(said, decoded)
    return found.doubts()


def _learned(made: Iterable[tuple[PromptRow, Sequence[Sequence[Stretch]]]], columns: Sequence[str]) -> Iterator[_Said]:
    for position, (row, completions) in enumerate(made):
        for column, stretches in zip(columns, completions, strict=True):
            said = row.columns[column]
            learned = [stretch.token_ids for stretch in stretches if stretch.is_learned]
            # Of messages, each by the assistant has a learned stretch of its own.
            numbers: Sequence[int | None] = (
                [None]
                if isinstance(said, str)
                else [number for number, message in enumerate(said) if message["role"] == ASSISTANT]
            )
            for number, ids in zip(numbers, learned, strict=True):
                yield _Said(row, position, column, number, ids)


class _Comparison:
    def __init__(self, found: Differences, tokenizer: Any, data: DataConfig) -> None:
        self._found, self._tokenizer, self._data = found, tokenizer, data
        self._specials = {str(token) for token in tokenizer.added_tokens_decoder.values()}

    def look_at(self, said: _Said, decoded: str) -> None:
        """Add the differences between a learned stretch and the text of its tokens."""
        completion = said.row.columns[said.column]
        if said.message is None:
            # Tokenizers that mark the beginning of a word drop the first blank of what they decode.
            self._look_at_kept(said, completion.strip(), decoded)
            return
        message = completion[said.message]
        blanks = " ".join(decoded.split())
        texts = (text for text in _texts(message).values() if text not in decoded)
        if any(" ".join(text.split()) not in blanks for text in texts) or any(
            name not in decoded for name in called(message)
        ):
            self._explain(said, message, decoded)

    def _explain(self, said: _Said, message: Message, decoded: str) -> None:
        """Add the text that the tokens do not show, as dropped by the template or by the tokenizer."""
        text, name = self._added_text(said), completion_name(said.column)
        for field, written in _texts(message).items():
            if shown_share(written, text) < 1:
                detail = f"the {field} of message {said.message} of the {name} is not learned as it is written"
                self._found.add("dropped_message", detail, certain=False)
        for function in called(message):
            if function not in text:
                detail = f"message {said.message} of the {name} calls {function!r}, which is not learned"
                self._found.add("dropped_message", detail, certain=False)
        self._look_at_kept(said, text, decoded)

    def _look_at_kept(self, said: _Said, text: str, decoded: str) -> None:
        if not is_kept(text, decoded, self._specials):
            lost = lost_characters(text, decoded)
            detail = (
                f"the tokens of the {completion_name(said.column)} stand for another text, because the tokenizer drops "
                f"or changes {lost}"
            )
            self._found.add("dropped_characters", detail, certain=False)

    def _added_text(self, said: _Said) -> str:
        """What the chat template adds for the message after the generation prompt."""
        row, completion = said.row, said.row.columns[said.column]
        prompt: list[Message] = [*row.prompt]
        messages: list[Message] = [*prompt, *completion[: said.message]]
        how = rendering(prompt, row.columns, self._data)

        def rendered(conversation: list[Message], *, asks: bool) -> str:
            given = how | {"add_generation_prompt": asks}
            return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, return_dict=False, **given))

        before = rendered(messages, asks=True)
        return rendered([*messages, completion[said.message]], asks=False).removeprefix(before)


def _texts(message: Message) -> dict[str, str]:
    """The texts of a message that are to be learned, by field."""
    return {
        name: message[name].strip() for name in _LEARNED if isinstance(message.get(name), str) and message[name].strip()
    }
