"""Combinations of parameters: `make test` tries a few that cover them, and `make test-all` tries each.

A case that is not among the few has the marker `exhaustive`. The few are chosen one after another, each so that most is
new in it; of equals, so that its values were chosen least often.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def covering(*axes: Iterable[Any], strength: int = 2) -> list[Any]:
    """All combinations of one value per axis, as parameters of `pytest.mark.parametrize`.

    Args:
        axes: the values of each parameter, in the order of their names.
        strength: any so many values, of as many axes, are together in one of the cases that `make test` tries; 1 means
            that each value is in one of them.
    """
    values = [list(axis) for axis in axes]
    few = chosen([len(axis) for axis in values], strength)
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(values, case, strict=True)),
            marks=[] if case in few else [pytest.mark.exhaustive],
        )
        for case in product(*(range(len(axis)) for axis in values))
    ]


def chosen(sizes: list[int], strength: int) -> set[tuple[int, ...]]:
    """The few cases, by the index of each axis's value; `sizes` are the numbers of values."""
    cases = list(product(*map(range, sizes)))
    new_in = {case: {*combinations(enumerate(case), strength)} for case in cases}
    left = set().union(*new_in.values())
    few: set[tuple[int, ...]] = set()
    times: Counter[tuple[int, int]] = Counter()
    while left:
        best = max(cases, key=lambda case: (len(new_in[case] & left), -sum(times[each] for each in enumerate(case))))
        few.add(best)
        left -= new_in[best]
        times.update(enumerate(best))
    return few
