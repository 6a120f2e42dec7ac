"""The differences between rows and their prompts: collected by kind, then refused, doubted, or allowed by the user.

It does not know how a difference is found.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from tasks.configuration.data import Kind
from tasks.prompts.prompt import PromptError

# What a user can do about each kind, apart from allowing it.
_ADVICE: dict[Kind, str] = {
    "assistant_last": "rows that end before the answer, or data.continue_final_message: true",
    "dropped_characters": "texts of which the tokenizer keeps all",
    "dropped_message": "messages that the chat template shows",
    "json_as_text": "lists and objects themselves (json.loads of the text)",
    "no_generation_prompt": "a chat template that reads add_generation_prompt",
    "stop_token_at_end": "a prompt after which the policy has something to say",
    "two_bos": "text without the token that the tokenizer adds",
    "unread_arguments": "tools and template arguments that the chat template reads",
}


@dataclass
class _Difference:
    """One kind: in how many rows, and the first of them."""

    rows: int
    place: str
    detail: str


class Differences:
    """Differences of the rows of one data set. `look` says which row is looked at."""

    def __init__(self, section: str, allowed: Collection[Kind], rows: int) -> None:
        """section: of the configuration, such as evaluation.data. rows: how many there are."""
        self._section = section
        self._allowed = allowed
        self._rows = rows
        self._certain: dict[Kind, _Difference] = {}
        self._unsure: dict[Kind, _Difference] = {}
        self._place: Callable[[], str] = str
        self._of_row: set[tuple[Kind, bool]] = set()

    def look(self, place: Callable[[], str]) -> None:
        """What is added from now on is about the row at this place."""
        self._place = place
        self._of_row.clear()

    def add(self, kind: Kind, detail: str, *, certain: bool) -> None:
        """A difference of this row; certain: no user means it. detail: the end of a sentence about the row."""
        if kind in self._allowed or (kind, certain) in self._of_row:
            return
        self._of_row.add((kind, certain))
        there = self._certain if certain else self._unsure
        if kind in there:
            there[kind].rows += 1
        else:
            there[kind] = _Difference(1, self._place(), detail)

    def doubts(self) -> list[str]:
        """A line for each kind that is not certain; raises PromptError, in one line, if any is certain."""
        if self._certain:
            lines = [self._line(kind, found, "allowed") for kind, found in self._certain.items()]
            raise PromptError("; ".join(lines))
        return [self._line(kind, found, "expected") for kind, found in self._unsure.items()]

    def _line(self, kind: Kind, found: _Difference, wanted: str) -> str:
        return (
            f"{self._section}.source: {found.rows} of {self._rows} rows, the first is {found.place}: {found.detail}; "
            f"{wanted}: {_ADVICE[kind]}, or {self._section}.allow: [{kind}]"
        )
