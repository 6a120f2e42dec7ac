"""The data of the page of a run, by path, as JSON values; a server and a written file give equal values.

Paths: summary; iterations/<n>; advantages/<n>; responses/<n>/<r>; texts/<n>/<r>/<r>...; tokens/<n>/<r>/<first>;
prompts/<id>. Control characters in prompts and responses are written out: a browser hides control characters, or turns
the neighbouring text around.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from resources.visible_text import visible
from storage.clock import Clock
from storage.records.prompt_table import PromptRow
from tasks.viewing.response_view import ResponseView, conversation_text
from tasks.viewing.run_reader import IterationReader, RunReader
from tasks.viewing.run_summary import summary

# Of a prompt and of a response, so many characters stand in the table of responses.
PREVIEW_CHARACTERS = 240
TEXT_CHARACTERS = 700
# A page of the table; each request for texts holds the tokens of all its responses.
TEXTS_AT_ONCE = 50


def page_data(reader: RunReader, clock: Clock, path: str) -> Any:
    """Return the value at a path. Raises LookupError for a path that the run does not have, and errors of reading."""
    kind, *rest = path.split("/")
    if kind == "summary" and not rest:
        return _plain_values(summary(reader.store, clock.wall()))
    if kind == "prompts" and rest:
        # An id may hold slashes.
        return _plain_values(reader.places(path.partition("/")[2]))
    found = _KINDS.get(kind)
    if found is None or len(rest) not in found[0] or not all(part.isdecimal() for part in rest):
        raise LookupError(f"path: value {path!r}; allowed: {', '.join(['summary', 'prompts', *_KINDS])}, with numbers")
    iteration, *numbers = map(int, rest)
    of_iteration = reader.iteration(iteration)
    if kind == "advantages":
        # Not under the lock: the first ones take seconds, in which responses can be read.
        return of_iteration.advantages
    with reader.lock:
        return found[1](of_iteration, *numbers)


def encode(value: Any) -> str:
    """The value as JSON, without spaces: those would be a sixth of the bytes of an iteration."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def index_data(reader: IterationReader) -> dict[str, Any]:
    """The index of an iteration, with its prompts by group."""
    # Not asdict, which copies every value.
    index = {name: value for name, value in vars(reader.index()).items() if name != "batches"}
    index["rewards"] = [_plain(value) for value in index["rewards"]]
    index["rewards_by_name"] = {
        visible(name): [_plain(value) for value in values] for name, values in index["rewards_by_name"].items()
    }
    return index | {"prompts": [{"id": prompt.prompt_id, "text": _preview(prompt)} for prompt in reader.prompts]}


def response_data(reader: IterationReader, number: int) -> dict[str, Any]:
    """The view of a response, with its advantage if that was asked for before."""
    return response_values(reader.view(number, with_advantage=reader.has_advantages))


def response_values(view: ResponseView) -> dict[str, Any]:
    """Return the view of a response as JSON values."""
    values: dict[str, Any] = _plain_values(asdict(view))
    # The page shows the id of the prompt, and asks for the prompt by the id as it is.
    return values | {"prompt_key": view.prompt_id}


def text_data(reader: IterationReader, *numbers: int) -> list[str | None]:
    """Return the excerpt of each response for its row; None for a response that is deleted.

    Raises LookupError for a number that the plan does not have.
    """
    if max(numbers) >= reader.plan.num_responses:
        raise LookupError(f"response: value {max(numbers)}; allowed: 0 to {reader.plan.num_responses - 1}")
    with reader.read_together(numbers) as readable:
        views = {number: reader.view(number, with_advantage=False) for number in readable}
    return [excerpt(views[number]) if number in views else None for number in numbers]


def excerpt(view: ResponseView) -> str:
    """Return the text of a response; of a longer text the beginning and, because answers come last, more of the end."""
    if not view.has_text:
        return "(the run holds no tokenizer)"
    text = "".join(stretch.text for stretch in view.stretches)
    left_out = len(text) - TEXT_CHARACTERS
    if left_out > 0:
        first, last = TEXT_CHARACTERS // 3, TEXT_CHARACTERS - TEXT_CHARACTERS // 3
        text = f"{text[:first]} [... {left_out:,} characters ...] {text[-last:]}"
    return visible(text)


def token_data(reader: IterationReader, number: int, first: int) -> list[tuple[str, float | None]]:
    """Texts and log-probs of some tokens of a response."""
    return [(visible(text), _plain(logprob)) for text, logprob in reader.tokens(number, first)]


# How many numbers follow the kind in a path, and the function that returns the value.
_KINDS: dict[str, tuple[Sequence[int], Callable[..., Any]]] = {
    "iterations": ([1], index_data),
    "advantages": ([1], lambda reader: reader.advantages),
    "responses": ([2], response_data),
    "texts": (range(2, 2 + TEXTS_AT_ONCE), text_data),
    "tokens": ([3], token_data),
}


def _preview(prompt: PromptRow) -> str:
    text = prompt.prompt if isinstance(prompt.prompt, str) else conversation_text(prompt.prompt)
    return visible(text if len(text) <= PREVIEW_CHARACTERS else text[: PREVIEW_CHARACTERS - 1] + "…")


def _plain_values(value: Any) -> Any:
    """A value of a view without numbers that JSON does not have, and without control characters."""
    if isinstance(value, dict):
        return {visible(name): _plain_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_values(each) for each in value]
    if isinstance(value, str):
        return visible(value)
    return _plain(value) if isinstance(value, float) else value


def _plain(value: float | None) -> float | None:
    """The number, or None for one that JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
