"""The arithmetic of one simulated iteration, by hand."""

import numpy as np
import pytest

from benchmarks.phase_start import Setting, iteration, measure

ENDS = np.array([0.25, 0.5, 0.75, 1.0])
# The trainer computes as long as the rollout takes: 0.25 for each of four groups.
HALF = Setting(sigma=0.8, busy=0.5, start=0.0)


@pytest.mark.parametrize(
    ("share", "length", "held"),
    [(0.0, 1.25, 1.25), (0.5, 1.5, 1.0), (1.0, 2.0, 1.0)],
)
def test_an_iteration_by_hand(share, length, held):
    assert iteration(ENDS, HALF, share) == pytest.approx((length, held))


def test_the_time_that_a_pod_needs_is_held_too():
    assert iteration(ENDS, Setting(sigma=0.8, busy=0.5, start=0.1), 1.0) == pytest.approx((2.1, 1.1))


def test_a_later_start_holds_machines_shorter_and_ends_no_sooner():
    found = measure(HALF, 20, np.random.default_rng(0))
    lengths, held = zip(*found.values(), strict=True)
    assert list(lengths) == sorted(lengths)
    assert list(held) == sorted(held, reverse=True)
