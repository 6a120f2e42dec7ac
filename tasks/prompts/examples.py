"""Examples: the rows of a data set that have completions, as prompts with finished responses.

An example is a prompt and a completion, or a whole conversation. The prompt ends where the assistant first speaks; the
rest is the response, in which the assistant's messages stand for the policy's turns. A pair is a prompt with two
completions, of which one was preferred. The rows are TRL's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from storage.records.prompt_table import PromptRow
from tasks.configuration.data import DataConfig
from tasks.prompts.prompt import Message, Prompt, PromptError, PromptSet, check_prompt
from tasks.prompts.rendering import rendering
from tasks.prompts.tokenise import Tokenizer, text_ids

# The columns of a `Prompt` of `ExamplePrompts` that have the completions, by `algorithm.kind`, in the order of a group.
COMPLETION = "completion"
COMPLETIONS = {"sft": (COMPLETION,), "dpo": ("chosen", "rejected")}
ASSISTANT = "assistant"
_SHOWN_CHARACTERS = 40


class ExamplePrompts:
    """A PromptSet of examples: what precedes the completion is the prompt, and COMPLETIONS are among the columns.

    A completion is text after a prompt of text, and else messages of which the first is the assistant's.
    """

    def __init__(self, prompts: PromptSet, config: DataConfig, kind: str = "sft") -> None:
        """Raises PromptError without a column that `config` names. kind: that of COMPLETIONS."""
        self._prompts = prompts
        # The data's columns, by the columns of the prompts; {} for whole conversations.
        self._columns = {name: str(column) for name, column in _columns(config, kind).items() if column is not None}
        for name, column in self._columns.items():
            if column not in prompts.columns:
                there = ", ".join(map(repr, sorted(prompts.columns))) or "none"
                or_null = f", or null where {config.prompt_column!r} has whole conversations" * (name == COMPLETION)
                raise PromptError(
                    f"{name}_column: value {column!r}; allowed: a column of every row of {config.source}{or_null}; "
                    f"there are: {there}"
                )
        self.doubts: Sequence[str] = getattr(prompts, "doubts", ())
        self.columns = (prompts.columns - {*self._columns.values()}) | {*COMPLETIONS[kind]}

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        prompt = self._prompts[index]
        where, named = self.place(index), self._columns
        if not named:
            asked, said = _conversation(prompt, where)
            return Prompt(prompt.id, asked, prompt.columns | {COMPLETION: said}, prompt.place)
        columns = {name: value for name, value in prompt.columns.items() if name not in named.values()}
        completions = {name: _completion(prompt, name, column, where) for name, column in named.items()}
        if len(completions) > 1 and completions["chosen"] == completions["rejected"]:
            raise PromptError(f"{where}: the chosen completion is the rejected one; allowed: two that differ")
        return Prompt(prompt.id, prompt.text_or_messages, columns | completions, prompt.place)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    def place(self, index: int) -> str:
        """The file and line or row of an example, for messages."""
        return self._prompts.place(index)


def _columns(config: DataConfig, kind: str) -> dict[str, str | None]:
    return {name: getattr(config, f"{name}_column") for name in COMPLETIONS[kind]}


def _completion(prompt: Prompt, name: str, column: str, where: str) -> str | list[Message]:
    asked = prompt.text_or_messages
    if column not in prompt.columns:
        raise PromptError(f"{where} has no column {column!r} (data.{name}_column)")
    said = check_prompt(prompt.columns[column], f"{where}: column {column!r}", completion_name(name))
    if isinstance(asked, str) != isinstance(said, str):
        kinds = ["text" if isinstance(each, str) else "messages" for each in (asked, said)]
        raise PromptError(
            f"{where}: the prompt is {kinds[0]}, the {completion_name(name)} {kinds[1]}; allowed: both of one kind"
        )
    if not isinstance(said, str) and said[0]["role"] != ASSISTANT:
        role = said[0]["role"]
        raise PromptError(
            f"{where}: the {completion_name(name)} begins with a message by {role!r}; allowed: {ASSISTANT!r}"
        )
    return said


def completion_name(name: str) -> str:
    """How messages name the completion in a column of COMPLETIONS."""
    return name if name == COMPLETION else f"{name} completion"


def _conversation(prompt: Prompt, where: str) -> tuple[list[Message], list[Message]]:
    messages = prompt.text_or_messages
    if isinstance(messages, str):
        raise PromptError(f"{where}: it is text; allowed with data.completion_column null: messages")
    first = next((place for place, each in enumerate(messages) if each["role"] == ASSISTANT), len(messages))
    if not first or first == len(messages):
        missing = "before the first by" if not first else "by"
        raise PromptError(f"{where}: a conversation without a message {missing} the assistant; allowed: one or more")
    return messages[:first], messages[first:]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of a response.

    Attributes:
        token_ids: The ids, at least one.
        is_learned: True for the assistant's tokens, which are trained.
    """

    token_ids: tuple[int, ...]
    is_learned: bool


def completions_of(
    rows: Sequence[PromptRow],
    tokenizer: Tokenizer,
    data: DataConfig,
    length_max: int,
    columns: Sequence[str] = (COMPLETION,),
) -> Iterator[list[tuple[Stretch, ...]]]:
    """Yield the responses of each example by stretches: learned tokens and others in turn, learned ones first and last.

    Text is tokenised together with its prompt, and ends with the tokenizer's eos_token, as in TRL. Of messages the chat
    template decides: an assistant's tokens are those that the template adds for the message after the generation
    prompt, the end of the turn included. Messages after the last one by the assistant are left out.

    Args:
        rows: Tokenised examples of `ExamplePrompts`.
        tokenizer: The model's tokenizer.
        data: The arguments of the chat template.
        length_max: The most tokens of a response (sampling.max_completion_length).
        columns: The columns with the completions, of COMPLETIONS.

    Raises:
        PromptError: The tokens of prompt and completion do not begin with the tokens of the prompt, the template
            changes earlier messages, a turn has no tokens, or the response is too long; names the prompt.
    """
    said = ((row.prompt, row.columns[column]) for row in rows for column in columns)
    whole = text_ids((f"{asked}{text}" for asked, text in said if isinstance(text, str)), tokenizer)

    def of_row(row: PromptRow, column: str) -> tuple[Stretch, ...]:
        text = row.columns[column]
        if isinstance(text, str):
            return _fitting(row, column, [_text(row, text, next(whole), tokenizer)], length_max)
        return _fitting(row, column, _turns(row, text, tokenizer, data), length_max)

    for row in rows:
        yield [of_row(row, column) for column in columns]


def _fitting(row: PromptRow, column: str, stretches: Sequence[Stretch], length_max: int) -> tuple[Stretch, ...]:
    length = sum(len(stretch.token_ids) for stretch in stretches)
    if length > length_max:
        raise PromptError(
            f"prompt {row.prompt_id!r} has a {completion_name(column)} of {length} tokens; allowed: {length_max} "
            "(sampling.max_completion_length). Remove the row, or raise sampling.max_completion_length"
        )
    return tuple(stretches)


def _text(row: PromptRow, said: str, whole: tuple[int, ...], tokenizer: Tokenizer) -> Stretch:
    """The completion in the tokens `whole` of prompt and completion."""
    end: Any = getattr(tokenizer, "eos_token_id", None)
    if end is None:
        raise PromptError(
            f"prompt {row.prompt_id!r}: the tokenizer has no eos_token, which ends a completion that is text"
        )
    added = _added(row, row.token_ids, whole, f"the completion {said[:_SHOWN_CHARACTERS]!r}")
    return Stretch(added if added[-1:] == (end,) else (*added, int(end)), is_learned=True)


def _turns(row: PromptRow, said: Sequence[Message], tokenizer: Tokenizer, data: DataConfig) -> list[Stretch]:
    messages: list[Message] = [*row.prompt]
    how = rendering(messages, row.columns, data)

    def rendered(*, asks: bool) -> tuple[int, ...]:
        try:
            ids = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=False, **how | {"add_generation_prompt": asks}
            )
        except Exception as error:  # a template is a program of the model's author and may raise anything
            reason = " ".join(str(error).split())[:300]
            raise PromptError(
                f"prompt {row.prompt_id!r}: the chat template refused its completion: {reason}"
            ) from error
        return tuple(int(token) for token in ids)

    stretches: list[Stretch] = []
    before = row.token_ids
    for message in said:
        is_learned = message["role"] == ASSISTANT
        if is_learned and stretches:
            asked = rendered(asks=True)
            added = _added(row, before, asked, "what follows a message by the assistant")
            stretches.append(Stretch(added, is_learned=False))
            before = asked
        messages.append(message)
        if is_learned:
            whole = rendered(asks=False)
            stretches.append(Stretch(_added(row, before, whole, "a message by the assistant"), is_learned=True))
            before = whole
    return stretches


def _added(row: PromptRow, before: tuple[int, ...], whole: tuple[int, ...], what: str) -> tuple[int, ...]:
    """The tokens of `whole` behind `before`; raises PromptError if they do not begin so, or there are none."""
    if whole[: len(before)] != before:
        raise PromptError(
            f"prompt {row.prompt_id!r}: with {what}, the tokens before it change; allowed: a prompt that ends where a "
            "token ends, and a chat template that writes a message alike whatever follows"
        )
    if len(whole) == len(before):
        raise PromptError(f"prompt {row.prompt_id!r}: {what} has no tokens; allowed: at least one")
    return whole[len(before) :]
