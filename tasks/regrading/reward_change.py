"""Reward change: what a grading says of responses, beside the rewards that the run recorded.

Values are compared iteration by iteration. Means and correlations come from moments, which are merged, so memory holds
one iteration.
"""

import io
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from rich.table import Table

from storage.journal.compaction import each_batch
from storage.records import layout
from storage.records.gradings import GradedRecord, read_graded
from storage.records.records import GradedResponse
from storage.records.run import read_plan
from storage.stores.store import CorruptObject, ObjectStore
from storage.waiting import Progress, no_progress
from tasks.reporting.terminal import Terminal

# The row of the weighted sum; a function of this name stands before it.
TOTAL = "reward"
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


def compare(store: ObjectStore, name: str, iterations: Sequence[int], progress: Progress = no_progress) -> RewardChange:
    """Compare a grading with the recorded rewards of iterations that it has.

    Raises LookupError for an iteration that is not graded, and CorruptObject if the two name different responses.
    """
    totals = _Moments()
    named: defaultdict[str, _Moments] = defaultdict(_Moments)
    groups, responses, errors, given_up = GroupChange(), 0, 0, 0
    for done, iteration in enumerate(iterations):
        progress(f"comparing iteration {iteration}", done, len(iterations))
        graded = read_graded(store, name, iteration)
        recorded = _recorded(store, graded)
        plan = read_plan(store, iteration)
        totals.add([each.reward if plan.is_graded else None for each in recorded], graded.reward)
        totals.is_in_both |= plan.is_graded
        of_run = {function for response in recorded for function in response.rewards}
        for function in of_run | graded.rewards.keys():
            old = [response.rewards.get(function) for response in recorded]
            named[function].add(old, graded.rewards.get(function, (None,) * len(old)))
        for function in of_run & graded.rewards.keys():
            named[function].is_in_both = True
        for before, after in _by_group(recorded, graded, plan.num_generations):
            groups = groups.plus(len(set(before)) > 1, len(set(after)) > 1)
        responses, errors = responses + len(recorded), errors + len(graded.reward_errors)
        given_up += len(graded.given_up)
    return RewardChange(
        grading=name,
        iterations=tuple(iterations),
        responses=responses,
        functions=tuple(moments.change(function) for function, moments in sorted(named.items())),
        reward=totals.change(TOTAL),
        groups=groups,
        reward_errors=errors,
        answers_given_up=given_up,
    )


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


def graded_table(responses: pa.Table, graded: GradedRecord) -> pa.Table:
    """The table of an iteration's responses with the rewards of a grading in place of the recorded ones.

    A response that failed has none. Raises CorruptObject if the grading names a response that the table does not have.
    """
    places = {number: place for place, number in enumerate(graded.responses)}
    numbers = responses["response"].to_pylist()
    if not places.keys() <= set(numbers):
        raise CorruptObject(layout.responses(graded.iteration), "the grading names responses that it does not have")
    found = [places.get(number) for number in numbers]
    first = responses.column_names.index(TOTAL)
    kept = responses.drop_columns([name for name in responses.column_names if _is_of_reward(name)])
    columns: Mapping[str, Sequence[float | None]] = {
        TOTAL: graded.reward,
        **{f"{TOTAL}_{name}": values for name, values in sorted(graded.rewards.items())},
    }
    for offset, (name, values) in enumerate(columns.items()):
        column = pa.array([None if place is None else values[place] for place in found], type=pa.float64())
        kept = kept.add_column(first + offset, name, column)
    return kept


def _is_of_reward(column: str) -> bool:
    return column == TOTAL or column.startswith(f"{TOTAL}_")


def _recorded(store: ObjectStore, graded: GradedRecord) -> list[GradedResponse]:
    """The recorded responses with a reward, by number; raises CorruptObject unless the grading names just these."""
    batches = each_batch(store, graded.iteration)
    found = [response for batch in batches for response in batch.graded if response.reward is not None]
    found.sort(key=lambda response: response.response)
    if tuple(response.response for response in found) != graded.responses:
        key = layout.batches(graded.iteration)
        raise CorruptObject(
            key, f"{len(found)} responses have a reward, and {len(graded.responses)} are graded again, of other numbers"
        )
    return found


def _by_group(
    recorded: Sequence[GradedResponse], graded: GradedRecord, size: int
) -> Iterator[tuple[list[float | None], list[float]]]:
    """The recorded and the graded rewards of each group."""
    by_group: dict[int, tuple[list[float | None], list[float]]] = {}
    for response, reward in zip(recorded, graded.reward, strict=True):
        old, new = by_group.setdefault(response.response // size, ([], []))
        old.append(response.reward)
        new.append(reward)
    yield from by_group.values()


@dataclass
class _Side:
    """The number and the sum of values."""

    count: int = 0
    total: float = 0.0

    def add(self, values: Sequence[float | None]) -> None:
        present = [value for value in values if value is not None]
        self.count += len(present)
        self.total += math.fsum(present)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class _Moments:
    """Recorded and graded values of one function, as far as means and a correlation need them.

    Attributes:
        is_in_both: Whether run and grading have the function.
        recorded, graded: All values of a side.
        changed: How many responses differ.
        both: How many responses have both values.
        means: [2], of these responses.
        moments: [2, 2], sums of products of deviations from the means.
        bounds: [2, 2], the least and the greatest value of each side; a side whose two are equal is constant.
    """

    is_in_both: bool = False
    recorded: _Side = field(default_factory=_Side)
    graded: _Side = field(default_factory=_Side)
    changed: int = 0
    both: int = 0
    means: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]" = field(default_factory=lambda: np.zeros(2))
    moments: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]" = field(default_factory=lambda: np.zeros((2, 2)))
    bounds: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]" = field(
        default_factory=lambda: np.array([[np.inf, -np.inf]] * 2)
    )

    def add(self, recorded: Sequence[float | None], graded: Sequence[float | None]) -> None:
        """Add the values of an iteration, response by response."""
        self.recorded.add(recorded)
        self.graded.add(graded)
        self.changed += sum(old != new for old, new in zip(recorded, graded, strict=True))
        pairs = [pair for pair in zip(recorded, graded, strict=True) if None not in pair]
        if not pairs:
            return
        values = np.array(pairs, dtype=np.float64)
        means = values.mean(axis=0)
        apart, total = means - self.means, self.both + len(values)
        deviations = values - means
        # The moments of two sets together (Chan, Golub and LeVeque 1979).
        self.moments += deviations.T @ deviations + np.outer(apart, apart) * self.both * len(values) / total
        self.means += apart * len(values) / total
        self.both = total
        self.bounds[:, 0] = np.minimum(self.bounds[:, 0], values.min(axis=0))
        self.bounds[:, 1] = np.maximum(self.bounds[:, 1], values.max(axis=0))

    def change(self, name: str) -> FunctionChange:
        """What people see of the values."""
        return FunctionChange(
            name=name,
            recorded=self.recorded.mean,
            graded=self.graded.mean,
            changed=self.changed if self.is_in_both else None,
            correlation=self._correlation(),
        )

    def _correlation(self) -> float | None:
        if self.both < 2 or (self.bounds[:, 0] == self.bounds[:, 1]).any():
            return None
        spread = math.sqrt(self.moments[0, 0]) * math.sqrt(self.moments[1, 1])
        # Squares of the smallest floats are 0; rounding may lead beyond 1.
        return float(np.clip(self.moments[0, 1] / spread, -1.0, 1.0)) if spread else None


def _span(iterations: Sequence[int]) -> str:
    first, last = iterations[0], iterations[-1]
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
