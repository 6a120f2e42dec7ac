import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.plan import assign_groups, sampling_params
from tasks.sampling.config import SamplingConfig


@given(st.integers(1, 200), st.integers(1, 50))
def test_every_group_is_given_to_one_slot_and_slots_are_even(groups, slots):
    assignment = assign_groups(groups, slots)
    assert len(assignment) == slots
    assert sorted(group for slot in assignment for group in slot) == list(range(groups))
    sizes = [len(slot) for slot in assignment]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("groups", "slots"), [(0, 1), (1, 0)])
def test_nothing_to_assign_is_refused(groups, slots):
    with pytest.raises(ValueError, match="at least one of each"):
        assign_groups(groups, slots)


def test_sampling_params_carry_every_setting():
    params = sampling_params(SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, max_completion_length=9), (2, 3))
    assert (params.temperature, params.top_p, params.top_k, params.max_completion_length) == (0.7, 0.9, 5, 9)
    assert params.stop_token_ids == (2, 3)
