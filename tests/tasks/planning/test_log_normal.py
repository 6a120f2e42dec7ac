"""Deviations and quantiles of what lengths are expected as: each is the inverse of the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.log_normal import HIGH, high_of, spread_of


@given(st.floats(1, 1e5), st.floats(0, 1.9))
def test_spread_and_high_are_inverse(mean, relative):
    expected = np.array([mean])
    spread = spread_of(expected, high_of(expected, relative * expected))
    assert spread == pytest.approx(min(HIGH, np.sqrt(np.log1p(relative**2))), abs=1e-5)
