"""What siblings say: towards what has ended, never below what already runs, and nothing where nothing is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.length_scores import rank_correlation
from tasks.planning.log_normal import HIGH, spread_of
from tasks.planning.offer import GroupLengths
from tasks.planning.sibling_lengths import expected_left, with_siblings

NAN = np.nan


def expecting(*expected: float, ratio: float = 1.8) -> GroupLengths:
    means = np.array(expected)
    return GroupLengths("history", means, ratio * means)


def test_nothing_known_changes_nothing():
    lengths = expecting(100.0, 200.0)
    updated = with_siblings(lengths, np.full((2, 4), NAN), np.zeros((2, 4)))
    assert updated.predictor == "siblings"
    assert updated.expected.tolist() == [100.0, 200.0]
    assert updated.high.tolist() == lengths.high.tolist()


def test_the_mean_is_the_weighted_one_of_two_normals():
    """Without running members the posterior has a closed form: precisions add."""
    lengths, rho = expecting(100.0), 0.25
    s2 = float(spread_of(lengths.expected, lengths.high)[0]) ** 2
    prior, ended = np.log(100.0) - s2 / 2, np.log([150.0, 250.0])
    precision = 1 / rho + 2 / (1 - rho)
    mean = (prior / rho + ended.sum() / (1 - rho)) / precision
    left = np.sqrt(s2 * (1 - rho) + s2 / precision)
    updated = with_siblings(lengths, np.array([[150.0, 250.0, NAN]]), correlation=rho)
    assert updated.expected == pytest.approx([np.exp(mean + left**2 / 2)])
    assert updated.high == pytest.approx([np.exp(mean + HIGH * left)])


def test_who_runs_longer_than_expected_is_expected_to_be_longer():
    finished, running = np.array([[50.0, NAN, NAN]]), np.array([[NAN, 150.0, 150.0]])
    without = with_siblings(expecting(100.0), finished)
    aware = with_siblings(expecting(100.0), finished, running)
    assert without.expected[0] < 100
    assert aware.expected[0] > 150


def test_running_members_that_have_hardly_begun_say_hardly_anything():
    finished = np.array([[80.0, NAN, NAN]])
    updated = with_siblings(expecting(100.0), finished, np.array([[NAN, 1.0, 1.0]]))
    assert updated.expected == pytest.approx(with_siblings(expecting(100.0), finished).expected, rel=1e-3)


def test_the_first_to_end_do_not_make_a_drawn_group_look_short():
    """Groups drawn from the model itself, the shortest half of each has ended: the update must not be biased."""
    rng = np.random.default_rng(3)
    s, size = 0.5, 2000
    mean = np.log(100) + np.sqrt(0.5) * s * rng.normal(size=(size, 1))
    drawn = np.sort(np.exp(mean + np.sqrt(0.5) * s * rng.normal(size=(size, 8))), axis=1)
    prior_mean = np.exp(np.log(100) + s**2 / 2)
    lengths = expecting(*[prior_mean] * size, ratio=np.exp(HIGH * s - s**2 / 2))
    finished, running = drawn.copy(), np.full(drawn.shape, NAN)
    finished[:, 4:] = NAN
    running[:, 4:] = drawn[:, 3:4]
    actual = drawn[:, 4:].mean(axis=1)
    aware = with_siblings(lengths, finished, running)
    assert aware.expected.mean() == pytest.approx(actual.mean(), rel=0.05)
    assert with_siblings(lengths, finished).expected.mean() < 0.85 * actual.mean()
    assert rank_correlation(aware.expected, actual) > 0.7


@given(
    st.lists(st.floats(1, 5000), min_size=1, max_size=6),
    st.floats(1, 2.2),
    st.integers(0, 2**32 - 1),
)
def test_always_finite_and_never_below_what_runs_in_common(expected, ratio, seed):
    rng = np.random.default_rng(seed)
    shape = (len(expected), 5)
    finished = np.where(rng.random(shape) < 0.5, rng.integers(1, 30_000, shape), NAN)
    running = np.where(np.isnan(finished), rng.integers(0, 30_000, shape), NAN)
    updated = with_siblings(expecting(*expected, ratio=ratio), finished, running)
    assert np.isfinite(updated.expected).all()
    assert (updated.high >= updated.expected).all()
    for row in range(shape[0]):
        begun = running[row][running[row] >= 1]
        assert not begun.size or updated.expected[row] >= begun.min() * (1 - 1e-9)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"allowed: \(2, samples\) each"):
        with_siblings(expecting(1.0, 2.0), np.ones((1, 4)))
    with pytest.raises(ValueError, match="correlation: value 1"):
        with_siblings(expecting(1.0), np.ones((1, 4)), correlation=1)


def test_what_is_left_is_more_where_siblings_were_long_and_unknown_where_nothing_runs():
    finished = np.array([[300.0, NAN, NAN], [40.0, NAN, NAN]])
    running = np.array([[NAN, 30.0, NAN], [NAN, 30.0, 60.0]])
    left = expected_left(expecting(100.0, 100.0), finished, running)
    assert np.isnan(left[:, 0]).all()
    assert np.isnan(left[0, 2])
    assert left[0, 1] > left[1, 1] > left[1, 2]
