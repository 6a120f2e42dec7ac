"""The differences between rows and their prompts: collected by kind, then refused, doubted, or allowed by the user.

The search for differences is in `row_comparison`.
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
    """A kind of difference in a data set.

    Attributes:
        rows: The number of rows with the difference.
        place: The first such row, by file and line.
        detail: The end of a sentence about the first such row.
    """

    rows: int
    place: str
    detail: str


class Differences:
    """The differences of the rows of a data set; `look` names the row of later calls of `add`."""

    def __init__(self, section: str, allowed: Collection[Kind], rows: int) -> None:
        """Begin without differences.

        Args:
            section: The section of the configuration, such as evaluation.data.
            allowed: The kinds that the configuration allows.
            rows: The number of rows in the data set.
        """
        self._section = section
        self._allowed = allowed
        self._rows = rows
        self._certain: dict[Kind, _Difference] = {}
        self._unsure: dict[Kind, _Difference] = {}
        self._place: Callable[[], str] = str
        self._of_row: set[tuple[Kind, bool]] = set()

    def look(self, place: Callable[[], str]) -> None:
        """Begin with the row at this place; later calls of `add` are about the row."""
        self._place = place
        self._of_row.clear()

    def add(self, kind: Kind, detail: str, *, certain: bool) -> None:
        """Add a difference of the row. certain: no user can mean it. detail: the end of a sentence about the row."""
        if kind in self._allowed or (kind, certain) in self._of_row:
            return
        self._of_row.add((kind, certain))
        by_kind = self._certain if certain else self._unsure
        if kind in by_kind:
            by_kind[kind].rows += 1
        else:
            by_kind[kind] = _Difference(1, self._place(), detail)

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
