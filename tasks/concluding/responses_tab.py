"""The tab "Responses" of an iteration's Deck: the best, the worst and the longest response, as text."""

import logging
from collections.abc import Mapping

from resources.visible_text import markup
from storage.stores.store import ObjectStore
from tasks.reporting.deck import styled
from tasks.viewing.response_index import ResponseIndex
from tasks.viewing.response_view import ResponseView
from tasks.viewing.run_reader import RunReader

log = logging.getLogger(__name__)
# Of a prompt and of a response so many characters are shown; the whole tab stays below 100 kB.
CHARACTERS_MAX = 6000
_TEXT = (
    "white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--border,#d0d7de);border-radius:6px;padding:8px;"
    "margin:4px 0;font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:13px"
)


def responses_tab(store: ObjectStore, iteration: int) -> dict[str, str]:
    """The tab by its name; none if the responses cannot be read, which must not fail a committed iteration."""
    try:
        reader = RunReader(store).iteration(iteration)
        views = [
            (title, reader.view(number, with_advantage=False))
            for title, number in best_worst_longest(reader.index()).items()
        ]
    except Exception as error:  # noqa: BLE001 - the page is for people
        log.warning("the Deck shows no responses: %s", error)
        return {}
    return {"Responses": styled([_section(store.url, title, view) for title, view in views])} if views else {}


def best_worst_longest(index: ResponseIndex) -> Mapping[str, int]:
    """Return the responses with the highest reward, the lowest reward and the most tokens, by label.

    A response with two labels keeps the first. Without rewards there is the longest alone, and without a recorded
    response there is none.
    """
    graded = [(reward, number) for number, reward in enumerate(index.rewards) if reward is not None]
    if not graded:
        trained = [number for number, state in enumerate(index.states) if state == "trained"]
        return {"Longest": max(trained, key=lambda number: (index.lengths[number], -number))} if trained else {}
    found = {
        "Highest reward": max(graded, key=lambda each: (each[0], -each[1]))[1],
        "Lowest reward": min(graded)[1],
        "Longest": max(graded, key=lambda each: (index.lengths[each[1]], -each[1]))[1],
    }
    first: dict[int, str] = {}
    for title, number in found.items():
        first.setdefault(number, title)
    return {title: number for number, title in first.items()}


def _section(url: str, title: str, view: ResponseView) -> str:
    killed = sum(stretch.end == "killed" for stretch in view.stretches)
    values = ((name, "not applicable" if value is None else f"{value:.3g}") for name, value in view.rewards.items())
    by_name = ", ".join(" ".join(each) for each in values)
    reward = "" if view.reward is None else f"reward {view.reward:.3g} ({by_name}), "
    end = view.stretches[-1].end if view.stretches else "not begun"
    resumed = f"; killed and resumed {killed} time{'s' * (killed > 1)}" if killed else ""
    facts = f"Response {view.response} of group {view.group}: {reward}{view.tokens:,} tokens, {end}{resumed}."
    text = "".join(stretch.text for stretch in view.stretches) if view.has_text else "(the run holds no tokenizer)"
    return (
        f"<h3>{markup(title)}</h3><p>{markup(facts)}</p>"
        f'<div style="{_TEXT}">{_escaped(view.prompt)}</div><div style="{_TEXT}">{_escaped(text)}</div>'
        f"<p>All of it: <code>gleaner show {markup(url)} {view.iteration} {view.response}</code></p>"
    )


def _escaped(text: str) -> str:
    left = len(text) - CHARACTERS_MAX
    return markup(text[:CHARACTERS_MAX]) + (f"<em> ... {left:,} more characters</em>" if left > 0 else "")
