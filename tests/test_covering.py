"""The few cases of tests.covering have each value, or each pair of values, and not many more."""

from itertools import combinations
from math import prod

import pytest

from tests.covering import chosen, covering


@pytest.mark.parametrize("sizes", [[3, 2], [10, 3], [4, 4, 3], [2, 2, 2, 11], [2, 3, 4, 5]])
@pytest.mark.parametrize("strength", [1, 2])
def test_every_pair_is_in_one_of_the_few(sizes, strength):
    few = chosen(sizes, strength)
    for axes in combinations(range(len(sizes)), strength):
        assert len({tuple(case[axis] for axis in axes) for case in few}) == prod(sizes[axis] for axis in axes)
    least = prod(sorted(sizes)[-strength:])
    assert least <= len(few) <= 1.5 * least


def test_all_cases_are_there_and_those_that_are_not_among_the_few_are_marked():
    cases = covering("abc", [True, False], [1, 2, 3])
    assert {case.values for case in cases} == {(a, b, c) for a in "abc" for b in (True, False) for c in (1, 2, 3)}
    few = [case.values for case in cases if not case.marks]
    assert 9 <= len(few) < len(cases)
    assert {mark.name for case in cases for mark in case.marks} == {"exhaustive"}
    assert len({(a, c) for a, _, c in few}) == 9
    assert len([case for case in covering("abc", [1, 2], strength=1) if not case.marks]) == 3
