"""What the page of a run asks for, by path, as JSON values; the same for a server and for a written file.

Paths: summary; iterations/<n>; advantages/<n>; responses/<n>/<r>; tokens/<n>/<r>/<first>; prompts/<id>. In what models
and data sets wrote, control characters are written out, because a browser hides them or turns the text around them.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from resources.visible_text import visible
from storage.clock import Clock
from storage.records.prompt_table import PromptRow
from tasks.viewing.response_view import conversation_text
from tasks.viewing.run_reader import IterationReader, RunReader
from tasks.viewing.run_summary import summary

# Of each prompt, so many characters stand in the table of responses.
PREVIEW_CHARACTERS = 120


def page_data(reader: RunReader, clock: Clock, path: str) -> Any:
    """What is at a path. Raises LookupError for a path that the run does not have, and what reading raises."""
    kind, *rest = path.split("/")
    if kind == "summary" and not rest:
        return _plain_values(summary(reader.store, clock.wall()))
    if kind == "prompts" and rest:
        # An id may hold slashes.
        return _plain_values(reader.places(path.partition("/")[2]))
    found = _KINDS.get(kind)
    if found is None or len(rest) != found[0] or not all(part.isdecimal() for part in rest):
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
    view = asdict(reader.view(number, with_advantage=reader.has_advantages))
    shown: dict[str, Any] = _plain_values(view)
    # The page shows the id of the prompt, and asks for the prompt by the id as it is.
    return shown | {"prompt_key": view["prompt_id"]}


def token_data(reader: IterationReader, number: int, first: int) -> list[tuple[str, float | None]]:
    """Texts and log-probs of some tokens of a response."""
    return [(visible(text), _plain(logprob)) for text, logprob in reader.tokens(number, first)]


# The numbers that follow the kind in a path, and what gives the value.
_KINDS: dict[str, tuple[int, Callable[..., Any]]] = {
    "iterations": (1, index_data),
    "advantages": (1, lambda reader: reader.advantages),
    "responses": (2, response_data),
    "tokens": (3, token_data),
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
