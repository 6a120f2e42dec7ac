"""Reward change: what a grading says of responses, beside the rewards that the run recorded."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from tasks.reporting.terminal import Terminal

# Of a text that no terminal shows.
TEXT_WIDTH = 120


@dataclass(frozen=True, kw_only=True)
class FunctionChange:
    """The values of one reward function, or the reward, as recorded and as graded again.

    Attributes:
        name: The function's name.
        recorded: The mean of the recorded values; None without any.
        graded: The mean of the grading's values; None without any.
        changed: How many responses have another value, or a value in only one of both; None for a function of only
            one of both.
        correlation: Pearson's, over responses with both values; None where either is constant, or for fewer than two.
    """

    name: str
    recorded: float | None
    graded: float | None
    changed: int | None
    correlation: float | None


@dataclass(frozen=True, kw_only=True)
class GroupChange:
    """Groups with a signal, which have at least two different rewards.

    Attributes:
        groups: How many groups are compared.
        recorded: How many have a signal by the recorded rewards.
        graded: How many have a signal by the grading.
        gained: How many have a signal by the grading alone.
        lost: How many have a signal by the recorded rewards alone.
    """

    groups: int = 0
    recorded: int = 0
    graded: int = 0
    gained: int = 0
    lost: int = 0

    def plus(self, has_recorded: bool, has_graded: bool) -> "GroupChange":
        """With one group more."""
        return GroupChange(
            groups=self.groups + 1,
            recorded=self.recorded + has_recorded,
            graded=self.graded + has_graded,
            gained=self.gained + (has_graded and not has_recorded),
            lost=self.lost + (has_recorded and not has_graded),
        )


@dataclass(frozen=True, kw_only=True)
class RewardChange:
    """A grading beside the recorded rewards.

    Attributes:
        grading: The grading's name.
        iterations: The compared iterations.
        responses: How many responses are graded in them.
        functions: The functions, by name.
        reward: The weighted sums.
        groups: The signal of groups, by their rewards.
        reward_errors: How many calls failed.
        answers_given_up: How many answers verifiers gave up.
    """

    grading: str
    iterations: tuple[int, ...]
    responses: int
    functions: tuple[FunctionChange, ...]
    reward: FunctionChange
    groups: GroupChange
    reward_errors: int
    answers_given_up: int

    def __str__(self) -> str:
        return change_text(self)


def change_text(change: RewardChange, width: int = TEXT_WIDTH) -> str:
    """A row for each function and for the reward, with the groups below, in lines of at most `width` characters."""
    buffer = io.StringIO()
    Terminal(file=buffer, width=width).print(_table(change))
    return f"{buffer.getvalue()}{group_line(change)}"


def _table(change: RewardChange) -> Table:
    of = _span(change.iterations)
    grid = Table("", "recorded", "graded", "changed", "correlation", title=f"grading {change.grading}, {of}")
    for each in (*change.functions, change.reward):
        grid.add_row(
            each.name,
            *map(_number, (each.recorded, each.graded)),
            "" if each.changed is None else f"{each.changed:,} of {change.responses:,}",
            _number(each.correlation),
        )
    return grid


def group_line(change: RewardChange) -> str:
    """A line about the signal of groups, and one about failures if there are any."""
    groups = change.groups
    line = (
        f"groups with a signal: {groups.recorded:,} of {groups.groups:,} as recorded, {groups.graded:,} as graded; "
        f"{groups.gained:,} gain it, {groups.lost:,} lose it"
    )
    failed = f"failed calls: {change.reward_errors:,}; answers given up: {change.answers_given_up:,}"
    return f"{line}\n{failed}" if change.reward_errors or change.answers_given_up else line


def _span(iterations: Sequence[int]) -> str:
    first, last = iterations[0], iterations[-1]
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
