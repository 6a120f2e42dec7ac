"""A rank that does not come is named by one that waits for it."""

import re

import pytest

from tasks.learning.missed_ranks import missed_by
from tests.forked import ForkedScript


@pytest.mark.parametrize(
    ("rank", "published", "missed"),
    [
        (0, [7, None], [1]),  # it has published nothing, as one that holds the interpreter
        (0, [7, 6], [1]),
        (0, [7, 7], []),  # both compute, or the network holds them up
        (0, [7, 8], []),  # this one is missed
        (1, [6, 7, 7], [0]),
        (2, [6, 7, 7], []),  # rank 1 says so
        (0, [7, 7, None, 3], [2, 3]),
    ],
)
def test_the_lowest_rank_that_waits_names_those_that_have_not_come(rank, published, missed):
    assert missed_by(rank, 7, published) == missed


@pytest.mark.slow
@pytest.mark.parametrize("where", ["join", "sum", "deal", "leave"])
def test_a_rank_that_hangs_is_named_after_ten_seconds_with_when_it_is_given_up(tmp_path, where):
    told = heard(tmp_path, where)
    assert re.fullmatch(
        r"waiting for rank 1 of 2, without which a step does not go on, since .* UTC and until .* UTC; then all ranks "
        r"fail, and another attempt goes on from what is kept\n",
        told[0],
    ), told
    assert told[1] == ""


@pytest.mark.slow
def test_ranks_that_compute_for_long_are_not_waited_for(tmp_path):
    assert heard(tmp_path, "busy") == ["", ""]


def heard(folder, where):
    """What each of two ranks logs."""
    ranks = [ForkedScript("tests.tasks.learning.late_rank", str(folder), str(rank), where) for rank in range(2)]
    told = [each.communicate(120)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], told
    return told
