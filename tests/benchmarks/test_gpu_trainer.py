"""The responses that the part `trainer` of benchmarks.gpu trains on."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.trainer import completion_lengths


@given(st.integers(2, 128), st.integers(1, 512), st.integers(16, 2048), st.sampled_from([0.0, 0.2, 0.4]))
def test_lengths_have_the_share_of_padding_that_is_asked_for(count, prompt, most, share):
    lengths = completion_lengths(count, prompt, most, share)
    assert len(lengths) == count
    assert max(lengths) == most
    assert min(lengths) >= 1
    padding = 1 - (count * prompt + sum(lengths)) / (count * (prompt + most))
    # A long prompt bounds the share that can be had, and one response of the most tokens is always there.
    most_possible = (most - 1) * (count - 1) / (count * (prompt + most))
    assert abs(padding - min(share, most_possible)) <= 1 / (prompt + most) + 1e-9
