"""Submitted prompts: those that a program gives for one iteration, each with the columns that rewards read."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from storage.digests import digest_of
from tasks.prompts.plain_values import check_text, plain
from tasks.prompts.prompt import Prompt, PromptError, check_prompt

PROMPT, TOKENS = "prompt", "prompt_token_ids"
_ID_DIGITS = 16


class SubmittedPrompts:
    """A PromptSet of given prompts, in the given order. The id of a prompt follows from its content."""

    def __init__(self, prompts: Iterable[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]]) -> None:
        """Read each prompt: text, a list of messages, or a mapping with `prompt` and further columns.

        A mapping may have `prompt_token_ids`: the policy reads these tokens, and people read `prompt`. Raises
        PromptError for no prompt, and for a prompt of another form, by its number.
        """
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise PromptError(f"prompts: value of type {type(prompts).__name__}; allowed: a list of prompts")
        listed = list(prompts)
        if not listed:
            raise PromptError("prompts: none; allowed: at least one")
        seen: Counter[str] = Counter()
        self._prompts = [_read(given, number, seen) for number, given in enumerate(listed)]
        first = self._prompts[0].columns.keys()
        for number, prompt in enumerate(self._prompts):
            if prompt.columns.keys() != first:
                raise PromptError(f"{self.place(number)}: columns {sorted(prompt.columns)}; allowed: {sorted(first)}")
        self.columns = frozenset(first)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def place(self, index: int) -> str:
        """The number of a prompt in the list, for messages."""
        return f"prompts.{index}"


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"column {name!r}; allowed: a name that is text")
    return check_text(name, "a column")


def _read(given: Any, number: int, seen: Counter[str]) -> Prompt:
    where = f"prompts.{number}"
    row = dict(given) if isinstance(given, Mapping) else {PROMPT: given}
    if PROMPT not in row:
        raise PromptError(f"{where}: it has no {PROMPT!r}; allowed: text, messages, or a mapping with {PROMPT!r}")
    try:
        columns = {_name(name): plain(value, name) for name, value in row.items()}
    except (TypeError, ValueError) as error:
        raise PromptError(f"{where}: {error}") from None
    content, tokens = check_prompt(columns.pop(PROMPT), where), columns.pop(TOKENS, None)
    if tokens is not None and not (
        isinstance(tokens, list) and tokens and all(type(token) is int and 0 <= token < 1 << 32 for token in tokens)
    ):
        raise PromptError(f"{where}: {TOKENS}: allowed: a list of token ids, with at least one")
    named = [content, columns] if tokens is None else [content, columns, tokens]
    body = json.dumps(named, sort_keys=True, ensure_ascii=False).encode()
    name = digest_of(body)[:_ID_DIGITS]
    seen[name] += 1
    # A prompt that is given twice is two groups.
    return Prompt(
        name if seen[name] == 1 else f"{name}-{seen[name]}",
        content,
        columns,
        where,
        token_ids=None if tokens is None else tuple(tokens),
    )
