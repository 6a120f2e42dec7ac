"""Conversion of a prompt to token ids, with an error for a prompt that does not fit.

Truncating a prompt would silently train on another question, so prompts are never cut.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from tasks.configuration.data import DataConfig
from tasks.prompts.prompt import Message, Prompt, PromptError
from tasks.prompts.rendering import rendering

# Of one call, which holds what it finds of each text until its end.
TEXTS_AT_ONCE = 1024


class Tokenizer(Protocol):
    """The two calls of transformers' tokenizers that prompts need. A forbidden text raises PromptError.

    With an attribute `is_fast` that is true, a call also takes a list of texts, and its values are lists of theirs.
    """

    def __call__(self, text: Any) -> Mapping[str, Any]: ...

    def apply_chat_template(
        self,
        conversation: list[Message],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **template_arguments: Any,
    ) -> Any: ...


@runtime_checkable
class AgentTokenizer(Tokenizer, Protocol):
    """A Tokenizer of runs whose agents begin the conversations: an opening is then an agent's first request."""

    def of_opening(self, opening: str) -> tuple[list[Message], Tokenizer]:
        """The messages of a first request, and a tokenizer that shows the request's tools; raises PromptError."""
        ...


def text_ids(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Yield the token ids of each text, by calls with many texts if the tokenizer is one of the library tokenizers.

    A call with many texts takes about a fifth of the time of a call for each.
    """
    if not getattr(tokenizer, "is_fast", False):
        for text in texts:
            yield tuple(int(token) for token in tokenizer(text)["input_ids"])
        return
    given = iter(texts)
    while some := list(islice(given, TEXTS_AT_ONCE)):
        yield from map(tuple, tokenizer(some)["input_ids"])


def with_text_ids(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts, with token ids of texts if the tokenizer is one of the library tokenizers."""
    are_texts = [isinstance(each.text_or_messages, str) and each.token_ids is None for each in prompts]
    if not getattr(tokenizer, "is_fast", False) or not any(are_texts):
        return list(prompts)
    texts = (str(each.text_or_messages) for each, is_text in zip(prompts, are_texts, strict=True) if is_text)
    ids = text_ids(texts, tokenizer)
    return [
        replace(each, token_ids=next(ids)) if is_text else each
        for each, is_text in zip(prompts, are_texts, strict=True)
    ]


def tokenise(
    prompt: Prompt,
    tokenizer: Tokenizer,
    data: DataConfig,
    context_length: int,
    max_completion_length: int,
) -> tuple[int, ...]:
    """The token ids of `prompt`: messages by the chat template (see `rendering`), text as it is.

    Raises PromptError, naming the prompt, for a prompt without tokens, with more tokens than `data.max_prompt_length`,
    or that leaves less than `max_completion_length` of the `context_length`.
    """
    ids = _encode(prompt, tokenizer, data)
    length, max_prompt_length = len(ids), data.max_prompt_length
    if length == 0:
        raise PromptError(f"prompt {prompt.id!r} has no tokens")
    if max_prompt_length is not None and length > max_prompt_length:
        raise PromptError(
            f"prompt {prompt.id!r} has {length} tokens; allowed: {max_prompt_length} (data.max_prompt_length). "
            f"Remove the prompt or raise data.max_prompt_length"
        )
    if length + max_completion_length > context_length:
        raise PromptError(
            f"prompt {prompt.id!r} has {length} tokens; allowed: {context_length - max_completion_length} "
            f"(rollout.context_length {context_length} less sampling.max_completion_length {max_completion_length}). "
            f"Remove the prompt, lower sampling.max_completion_length or raise rollout.context_length"
        )
    return ids


def _encode(prompt: Prompt, tokenizer: Tokenizer, data: DataConfig) -> tuple[int, ...]:
    if prompt.token_ids is not None:
        return prompt.token_ids
    ids: Sequence[int]
    messages = prompt.text_or_messages
    if isinstance(messages, str):
        try:
            ids = tokenizer(messages)["input_ids"]
        except PromptError as error:
            raise PromptError(f"prompt {prompt.id!r}: {error}") from None
        return tuple(int(token) for token in ids)
    if not getattr(tokenizer, "chat_template", True):
        raise PromptError(
            f"policy.path: the tokenizer has no chat template, and prompt {prompt.id!r} is chat messages; allowed: a "
            "model with a chat template (chat_template.jinja beside tokenizer.json), or prompts that are text"
        )
    try:
        how = rendering(messages, prompt.columns, data)
    except PromptError as error:
        raise PromptError(f"prompt {prompt.id!r}: {error}") from None
    try:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **how)
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise PromptError(
            f"prompt {prompt.id!r}: the chat template refused it: {' '.join(str(error).split())[:300]}"
        ) from error
    return tuple(int(token) for token in ids)
