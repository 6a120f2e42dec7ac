"""A rank that does not come is named by one that waits for it."""

import re
from pathlib import Path

import pytest

from tasks.learning.missed_ranks import missed_by
from tests.forked import ForkedScript

WAITED_FOR = ("join", "sum", "deal", "leave")


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


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of two ranks logs, by the place where one is late; all pairs at the same time."""
    pairs = {where: started(tmp_path_factory.mktemp(where), where) for where in (*WAITED_FOR, "busy")}
    found = {where: [rank.communicate(120)[1] for rank in pair] for where, pair in pairs.items()}
    assert {rank.returncode for pair in pairs.values() for rank in pair} == {0}, found
    return found


def started(folder: Path, where: str) -> list[ForkedScript]:
    return [ForkedScript("tests.tasks.learning.late_rank", str(folder), str(rank), where) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("where", WAITED_FOR)
def test_a_rank_that_hangs_is_named_after_ten_seconds_with_when_it_is_given_up(told, where):
    first, late = told[where]
    assert re.fullmatch(
        r"waiting for rank 1 of 2, without which a step does not go on, since .* UTC and until .* UTC; then all ranks "
        r"fail, and another attempt goes on from what is kept\n",
        first,
    ), first
    assert late == ""


@pytest.mark.slow
def test_ranks_that_compute_for_long_are_not_waited_for(told):
    assert told["busy"] == ["", ""]
