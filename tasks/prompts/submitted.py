"""Submitted prompts: those that a program gives for one iteration, each with the columns that rewards read."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from storage.digests import digest_of
from tasks.prompts.plain_values import check_text, plain
from tasks.prompts.prompt import Prompt, PromptError, check_prompt

PROMPT = "prompt"
_ID_DIGITS = 16


class SubmittedPrompts:
    """A PromptSet of given prompts, in the given order. The id of a prompt follows from its content."""

    def __init__(self, prompts: Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]]) -> None:
        """Read each prompt: text, a list of messages, or a mapping with `prompt` and further columns.

        Raises PromptError for no prompt, and for a prompt of another form, by its number.
        """
        if isinstance(prompts, str | Mapping) or not prompts:
            raise PromptError(f"prompts: {type(prompts).__name__} of none; allowed: a list with at least one prompt")
        seen: Counter[str] = Counter()
        self._prompts = [_read(given, number, seen) for number, given in enumerate(prompts)]
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


def _read(given: Any, number: int, seen: Counter[str]) -> Prompt:
    where = f"prompts.{number}"
    row = dict(given) if isinstance(given, Mapping) else {PROMPT: given}
    if PROMPT not in row:
        raise PromptError(f"{where}: it has no {PROMPT!r}; allowed: text, messages, or a mapping with {PROMPT!r}")
    try:
        columns = {check_text(name, "a column"): plain(value, name) for name, value in row.items()}
    except (TypeError, ValueError) as error:
        raise PromptError(f"{where}: {error}") from None
    content = check_prompt(columns.pop(PROMPT), where)
    body = json.dumps([content, columns], sort_keys=True, ensure_ascii=False).encode()
    name = digest_of(body)[:_ID_DIGITS]
    seen[name] += 1
    # A prompt that is given twice is two groups.
    return Prompt(name if seen[name] == 1 else f"{name}-{seen[name]}", content, columns, where)
