"""A look at a run as text for a terminal: what failed, the phase, the progress, what is waited for, and the members.

What machines and stores wrote is shown, never interpreted. This module knows no store. The crew comes last, because a
low terminal cuts off the end.
"""

import io
from dataclasses import dataclass
from itertools import compress
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from resources.visible_text import markup
from tasks.reporting.charts import duration
from tasks.reporting.crew_view import MemberView, RunView, WaitingGroup
from tasks.reporting.deck import styled
from tasks.reporting.last_failures import failure_line

RESPONSES_SHOWN = 2
NAME_LENGTH = 10
STYLES = {"silent": "bold red", "gone": "dim", "not come": "dim", "unknown": "dim"}
WIDE = 100
LIVE_WIDTH = 140


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of members.

    Attributes:
        title: The title.
        is_number: Whether cells are right-aligned.
        width_min: The least width, for cells that may be broken into lines; None: never broken.
        wide_only: Whether narrow terminals leave the column out.
    """

    title: str
    is_number: bool = False
    width_min: int | None = None
    wide_only: bool = False


COLUMNS = (
    Column("slot"),
    Column("incarnation"),
    Column("state"),
    Column("heartbeat", width_min=12),
    Column("tokens/s", is_number=True),
    Column("run/wait/open", is_number=True),
    Column("generated", is_number=True, wide_only=True),
    Column("recovered", is_number=True, wide_only=True),
    Column("pool", wide_only=True),
    Column("host", width_min=8, wide_only=True),
)


def screen(view: RunView, width: int) -> RenderableType:
    """One look on `width` characters; the same text in a terminal and in a pipe."""
    failed = [failure_line(failure) for failure in view.failures] or [view.silent_end] * bool(view.silent_end)
    parts: list[RenderableType] = [Text(line, style="bold red") for line in failed]
    parts += [Text(line) for line in summary(view)]
    if view.notice:
        parts.append(Text(f"this was some time ago; the store does not answer: {view.notice}", style="bold red"))
    if view.members:
        parts.append(crew_table(view.members, width))
    return Group(*parts)


def live_page(view: RunView) -> str:
    """One look as a tab of a Deck: the text of a wide terminal."""
    text = io.StringIO()
    Console(file=text, width=LIVE_WIDTH, color_system=None).print(screen(view, LIVE_WIDTH))
    return styled([f"<pre>{markup(text.getvalue())}</pre>"])


def summary(view: RunView) -> list[str]:
    """The lines above the table of the crew."""
    head = f"{view.run_url}   iteration {view.iteration}   {view.phase}, seen for {duration(view.phase_seen_s)}"
    totals = view.totals
    match view.phase:
        case "no run":
            return [f"{view.run_url} holds no run yet; waiting for one"]
        case "planning":
            return [head, "the iteration has no plan yet"]
        case "ended":
            return [head, f"{totals.responses_done} responses, {totals.tokens:,} tokens; the evaluation is closed"]
        case "committed":
            done = f"{totals.responses_done} responses, {totals.tokens:,} tokens"
            return [head, f"{done}; iteration {view.iteration + 1} has no plan yet"]
    responses = f"responses {totals.responses_done} of {totals.responses_planned}"
    groups = f"groups {totals.groups_done} of {totals.groups_planned}"
    rate = "" if totals.tokens_per_s is None else f"   {totals.tokens_per_s:,.0f} tokens/s"
    tokens = f"tokens {totals.tokens:,}{rate}"
    recorded = f"micro-batches recorded {totals.micro_batches}, with {totals.groups_recorded} groups"
    claims = f"claims {totals.claims}   responses moved between slots {totals.moved}"
    return [
        head,
        f"{responses}   {groups}   {tokens}",
        *_expectations(view),
        f"{recorded}   {claims}",
        *_trainer(view),
    ]


def _expectations(view: RunView) -> list[str]:
    """Return the line of the reward so far, the price of the members, the rest of the rollout, and waits for tools."""
    totals = view.totals
    parts = []
    if totals.reward is not None:
        parts.append(f"reward so far {totals.reward:.3f}")
    if totals.usd_per_h:
        parts.append(f"members {totals.usd_per_h:,.2f} $/h")
    if totals.to_go_s is not None:
        parts.append(f"rollout ends in about {duration(totals.to_go_s)}")
    if totals.acting:
        parts.append(f"responses that wait for tools {totals.acting}")
    return ["   ".join(parts)] if parts else []


def _trainer(view: RunView) -> list[str]:
    if view.phase == "publishing":
        return ["the step is taken; its checkpoint, weights and report are being written"]
    if not view.waits_for:
        return ["all responses are there; the trainer waits for nothing"]
    more = [f"  and {view.groups_behind} more groups"] if view.groups_behind else []
    return ["the trainer waits for", *map(_group, view.waits_for), *more]


def _group(group: WaitingGroup) -> str:
    parts = []
    for response in group.unfinished[:RESPONSES_SHOWN]:
        holder = "not claimed" if response.holder is None else f"held by {short_name(response.holder)}"
        if response.released and response.holder is not None:
            holder = f"released by {short_name(response.holder)}"
        parts.append(f"{response.response} ({response.tokens:,} tokens, {holder})")
    if len(group.unfinished) > RESPONSES_SHOWN:
        parts.append(f"{len(group.unfinished) - RESPONSES_SHOWN} more")
    return f"  group {group.group}: responses {', '.join(parts)}"


def crew_table(members: tuple[MemberView, ...], width: int) -> Table:
    """One row per member; numbers that only a heartbeat tells are empty if there is none."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="underline")
    shown = [width >= WIDE or not column.wide_only for column in COLUMNS]
    for column in compress(COLUMNS, shown):
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, no_wrap=column.width_min is None, min_width=column.width_min)
    for member in members:
        cells = compress(_cells(member), shown)
        table.add_row(*cells, style=STYLES.get(member.state))
    return table


def _cells(member: MemberView) -> list[str]:
    slot, name = "joined" if member.joined else str(member.slot), short_name(member.incarnation or "")
    if member.state in ("not come", "unknown"):
        return [slot, name, member.state, "", "", f"-/-/{member.unfinished}", "", "", member.pool, ""]
    age = "not yet seen to change" if member.heartbeat_age_s is None else f"{duration(member.heartbeat_age_s)} ago"
    is_told = member.state == "working" and member.tokens_per_s is not None
    return [
        slot,
        name,
        member.state,
        "" if member.state == "gone" else age,
        f"{member.tokens_per_s:,.0f}" if is_told else "",
        f"{member.running}/{member.waiting}/{member.unfinished}",
        f"{member.tokens_generated:,}",
        f"{member.tokens_recovered:,}",
        member.pool,
        member.host,
    ]


def short_name(incarnation: str) -> str:
    """The slot and enough of the random part to tell a crew's incarnations apart."""
    return incarnation[:NAME_LENGTH]
