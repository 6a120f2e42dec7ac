"""Comparing a grading with the recorded rewards of its responses, iteration by iteration.

Means and correlations come from moments, which are merged, so memory holds one iteration.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from storage.journal.compaction import each_batch
from storage.records import layout
from storage.records.gradings import GradedRecord, read_graded
from storage.records.records import GradedResponse
from storage.records.run import read_plan
from storage.stores.store import CorruptObject, ObjectStore
from storage.waiting import Progress, no_progress
from tasks.regrading.reward_change import FunctionChange, GroupChange, RewardChange

# The row of the weighted sum; a function of this name stands before it.
TOTAL = "reward"


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
