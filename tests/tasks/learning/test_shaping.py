import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.learning.shaping import counted_responses, overlong_penalties, trained_responses


def test_overlong_penalties_by_hand():
    # The paper's: 16384 tokens are free, the penalty is whole at 20480.
    lengths = torch.tensor([1, 16384, 17408, 18432, 20480, 30000])
    assert overlong_penalties(lengths, 20480, 4096, 1.0).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalties(lengths, 20480, 4096, 0.5).tolist()[-3:] == [-0.25, -0.5, -0.5]
    for buffer in (0, 20481):
        with pytest.raises(ValueError, match=rf"overlong_buffer_length: value {buffer}; allowed: 1 to .* \(20480\)"):
            overlong_penalties(lengths, 20480, buffer, 1.0)


@given(st.integers(1, 50), st.data(), st.floats(0.01, 10.0))
def test_penalties_fall_with_length_between_their_bounds(limit, data, factor):
    buffer = data.draw(st.integers(1, limit))
    penalties = overlong_penalties(torch.arange(limit + 5), limit, buffer, factor)
    assert (penalties.diff() <= 0).all()
    assert penalties[: limit - buffer + 1].abs().max() == 0
    assert (penalties[limit:] == -factor).all()


def test_truncated_responses_are_trained_unless_they_are_masked():
    reasons = ["stop", "length", "stop", "length"]
    assert trained_responses(reasons, AlgorithmConfig(mask_truncated=True), 2) == [0, 2]
    assert trained_responses(["length"], AlgorithmConfig(mask_truncated=True), 1) == []
    assert trained_responses(reasons, AlgorithmConfig(), 4) == [0, 1, 2, 3]


def test_a_response_that_failed_is_left_out_of_its_group_and_so_is_one_that_stays_alone():
    reasons = ["stop", "failed", "length", "failed", "stop", "failed", "failed", "failed", "failed"]
    assert counted_responses(reasons, 3) == [0, 2]
    assert trained_responses(reasons, AlgorithmConfig(), 3) == [0, 2]
    assert trained_responses(reasons, AlgorithmConfig(mask_truncated=True), 3) == [0]
    assert counted_responses(["stop", "failed"], 1) == [0]  # without groups there is nothing to be compared with
