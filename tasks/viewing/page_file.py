"""The page of a run as HTML: for the server, or as one file that holds the newest responses and needs nothing else."""

import base64
import hashlib
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from resources.visible_text import markup
from storage.clock import Clock
from tasks.viewing.page_data import encode, excerpt, page_data, response_values
from tasks.viewing.run_reader import TOKENS_AT_ONCE, RunReader

# What one file holds; a browser opens it at once.
FILE_RESPONSES_MAX = 5_000
FILE_TOKENS_MAX = 1_000_000
_HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Written:
    """A page that was written.

    Attributes:
        path: The HTML file.
        responses: How many responses the file holds.
        iterations: The iterations of the responses, ascending.
        num_bytes: The size of the file.
    """

    path: Path
    responses: int
    iterations: tuple[int, ...]
    num_bytes: int


def render_page(summary: Mapping[str, Any], answers: Mapping[str, Any] | None = None) -> str:
    """Return the HTML of the page.

    Args:
        summary: The value of the path `summary`.
        answers: The values of all other paths, for a file; None: the page asks its server.
    """
    style, script = _asset("page.css"), _asset("page.js")
    # In a script element of JSON, "<" could begin the tag that ends it.
    data = encode({"summary": summary, "answers": answers}).replace("<", "\\u003c")
    return Template(_asset("page.html")).substitute(
        policy=content_policy(connects=answers is None),
        title=markup(f"Gleaner: {summary['url']}"),
        style=style,
        script=script,
        data=data,
    )


def content_policy(*, connects: bool) -> str:
    """Return the Content-Security-Policy of the page: only the page's script runs.

    connects: True lets the page connect to its server; False forbids all connections.
    """
    digest = base64.b64encode(hashlib.sha256(_asset("page.js").encode()).digest()).decode()
    connect = "'self'" if connects else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def write_page(
    reader: RunReader,
    path: Path,
    clock: Clock,
    responses_max: int = FILE_RESPONSES_MAX,
    tokens_max: int = FILE_TOKENS_MAX,
) -> Written:
    """Write the page as one file; an interrupted write leaves no file.

    The file holds the responses of the newest iterations, group by group, up to both limits. Raises
    IsADirectoryError, FileNotFoundError for a missing folder, OSError if the file cannot be written, and the errors
    of reading.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; allowed: the name of a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} does not exist; allowed: a file in a folder that exists")
    answers: dict[str, Any] = {}
    places: dict[str, list[tuple[int, int]]] = {}
    held = []
    for iteration, groups in _held_groups(reader, responses_max, tokens_max):
        _add_groups(reader, clock, iteration, groups, answers, places)
        held.append(iteration)
    for prompt_id, found in places.items():
        answers[f"prompts/{_quoted(prompt_id)}"] = sorted(found)
    body = render_page(page_data(reader, clock, "summary"), answers).encode("utf-8", errors="replace")
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        unfinished.write_bytes(body)
        unfinished.replace(path)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return Written(
        path=path,
        responses=sum(key.startswith("responses/") for key in answers),
        iterations=tuple(sorted(held)),
        num_bytes=len(body),
    )


def _held_groups(reader: RunReader, responses_max: int, tokens_max: int) -> Iterator[tuple[int, int]]:
    """(iteration, number of its first groups) of the newest iterations, as long as a file has room."""
    responses = tokens = 0
    for iteration in reversed(range(reader.count())):
        index = reader.iteration(iteration).index()
        size = index.num_generations
        groups = len(index.states) // size
        for group in range(groups):
            responses += size
            tokens += sum(index.lengths[group * size : (group + 1) * size])
            if responses > responses_max or tokens > tokens_max:
                if group:
                    yield iteration, group
                return
        yield iteration, groups


def _add_groups(
    reader: RunReader,
    clock: Clock,
    iteration: int,
    groups: int,
    answers: dict[str, Any],
    places: dict[str, list[tuple[int, int]]],
) -> None:
    """Add the first groups of an iteration."""
    of_iteration = reader.iteration(iteration)
    size = of_iteration.plan.num_generations
    for group, prompt in enumerate(of_iteration.prompts[:groups]):
        places.setdefault(prompt.prompt_id, []).append((iteration, group * size))
    with of_iteration.read_together(range(groups * size)) as numbers:
        for kind in ("iterations", "advantages"):
            answers[f"{kind}/{iteration}"] = page_data(reader, clock, f"{kind}/{iteration}")
        for number in numbers:
            # Both values from a single view: tokens become text only once.
            view = of_iteration.view(number, with_advantage=of_iteration.has_advantages)
            answers[f"responses/{iteration}/{number}"] = response_values(view)
            answers[f"texts/{iteration}/{number}"] = [excerpt(view)]
            for first in range(0, max(1, view.tokens), TOKENS_AT_ONCE):
                path = f"tokens/{iteration}/{number}/{first}"
                answers[path] = page_data(reader, clock, path)


def _quoted(text: str) -> str:
    """As encodeURIComponent of a browser writes it."""
    return quote(text, safe="!'()*~-_.")


@cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
