"""Slots of a standing crew: as the guide's figures say, and as many as a simulated budget leaves."""

import random

import pytest

from tasks.planning.standing_count import share_left, standing_count


@pytest.mark.parametrize(("losses", "gone"), [(0.0, 0.0), (1.0, 0.019), (2.0, 0.143)])
def test_the_share_that_is_gone_is_the_guides(losses, gone):
    assert 1 - share_left(losses / 4, 4.0) == pytest.approx(gone, abs=5e-4)


def test_so_many_slots_are_left_if_losses_are_drawn_one_by_one():
    rng, left, slots = random.Random(0), 0, 20_000
    for _ in range(slots):
        now_h, losses = rng.expovariate(0.5), 0
        while now_h <= 5.0:
            now_h, losses = now_h + rng.expovariate(0.5), losses + 1
        left += losses <= 3
    assert left / slots == pytest.approx(share_left(0.5, 5.0), abs=0.01)


def test_the_count_leaves_the_members_and_one_fewer_would_not():
    count = standing_count(32, 0.5, 4.0)
    assert count is not None
    assert (count - 1) * share_left(0.5, 4.0) < 32 <= count * share_left(0.5, 4.0)
    assert standing_count(32, 0.0, 100.0) == 32


def test_a_long_execution_is_run_in_parts():
    assert standing_count(8, 0.5, 12.0) is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 0.5, 1.0), "members"), ((1, -1.0, 1.0), "losses_per_h"), ((1, 1.0, float("inf")), "hours")],
)
def test_impossible_values_are_named(arguments, named):
    with pytest.raises(ValueError, match=f"^{named}: value .*; allowed"):
        standing_count(*arguments)
