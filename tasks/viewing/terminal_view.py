"""A response in a terminal: what `gleaner show` prints. Texts of models and data are shown, never interpreted."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from resources.visible_text import visible
from tasks.reporting.terminal import Terminal
from tasks.viewing.response_index import ResponseIndex
from tasks.viewing.response_view import ResponseView, StretchView

# How the end of a stretch that another incarnation continued is marked between the texts.
CONTINUED = {"killed": "red", "handed over": "yellow", "taken over": "yellow"}


def response_screen(view: ResponseView, index: ResponseIndex) -> RenderableType:
    """Return one response below its prompt, and the rewards of the group."""
    return Group(
        Text(_title(view), style="bold"),
        Text(_rewards(view)),
        Rule("prompt", align="left"),
        Text(visible(view.prompt)),
        Rule("response", align="left"),
        *_stretches(view),
        *_calls(view),
        Rule(f"group {view.group}", align="left"),
        _group_table(view, index),
    )


def token_lines(tokens: Sequence[tuple[str, float | None]], first: int) -> Iterator[str]:
    """Yield a line for each token: position, log-prob, and text in quotes."""
    for position, (text, logprob) in enumerate(tokens, start=first):
        yield f"{position:>7} {'' if logprob is None else f'{logprob:.4f}':>10}  {visible(text)!r}"


def print_response(console: Terminal, view: ResponseView, index: ResponseIndex) -> None:
    """Print it; lines are broken only where the screen ends."""
    console.print(response_screen(view, index))


def _title(view: ResponseView) -> str:
    versions = sorted({stretch.weight_version for stretch in view.stretches})
    weights = f"weight version {', '.join(map(str, versions))}" if versions else "not begun"
    return (
        f"iteration {view.iteration}, response {view.response} (sample {view.sample} of group {view.group}), "
        f"prompt {visible(view.prompt_id)}: {view.tokens:,} tokens, {view.state}, {weights}"
    )


def _rewards(view: ResponseView) -> str:
    by_name = ", ".join(f"{visible(name)} {_number(value)}" for name, value in view.rewards.items())
    reward = "not graded" if view.reward is None else f"reward {_number(view.reward)}"
    advantage = "" if view.advantage is None else f"   advantage {view.advantage:+.3f}"
    again = "".join(f"   by grading {name} {_number(value)}" for name, value in view.gradings.items())
    return f"{reward}{f' ({by_name})' if by_name else ''}{advantage}{again}"


def _stretches(view: ResponseView) -> Iterator[RenderableType]:
    for stretch in view.stretches:
        yield Text(_stretch_line(stretch), style=CONTINUED.get(stretch.end, "dim"))
        yield Text(
            visible(stretch.text) if view.has_text else "(no tokenizer: gleaner show --tokens lists the token ids)"
        )


def _calls(view: ResponseView) -> Iterator[RenderableType]:
    if not view.calls:
        return
    yield Rule("calls of tools", align="left")
    for call in view.calls:
        yield Text(f"[turn {call.turn}, {call.outcome}, {call.seconds:.3f} s] {visible(call.call)}", style="dim")
        yield Text(visible(call.result))


def _stretch_line(stretch: StretchView) -> str:
    until = stretch.first + stretch.tokens
    end = f"{stretch.end} at token {until:,}" if stretch.end in CONTINUED else stretch.end
    return f"[{stretch.first:,} to {until:,}, slot {stretch.slot}, {stretch.incarnation}: {end}]"


def _group_table(view: ResponseView, index: ResponseIndex) -> Table:
    table = Table("response", "reward", "tokens", "state", "stretches", box=None, pad_edge=False)
    size = index.num_generations
    for number in range(view.group * size, (view.group + 1) * size):
        reward = index.rewards[number]
        cells = (
            f"{number}{' *' if number == view.response else ''}",
            "" if reward is None else _number(reward),
            f"{index.lengths[number]:,}{' (cut)' if index.truncated[number] else ''}",
            index.states[number],
            f"{index.stretches[number]}",
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _number(value: float | None) -> str:
    return "not applicable" if value is None else f"{value:.4g}"
