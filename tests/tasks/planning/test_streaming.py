"""When groups end and when training does, against a simulation token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.planning.makespan import Member, member_time_s
from tasks.planning.step_time import StepTime
from tasks.planning.streaming import group_ends_s, long_then_short, streamed_s

CURVE = StepTime(((1, 0.5), (4, 0.75), (8, 2.0)))
LENGTHS = st.integers(1, 5).flatmap(
    lambda n: st.lists(st.lists(st.integers(1, 12), min_size=n, max_size=n), min_size=1, max_size=6)
)


def token_by_token(lengths: list[list[int]], slots: int) -> list[float]:
    """Every step decodes one token of each response in flight; a slot that falls free takes the next one."""
    waiting = [(group, tokens) for group, responses in enumerate(lengths) for tokens in responses]
    running: list[list[int]] = []
    ends = [0.0] * len(lengths)
    now_s = 0.0
    while waiting or running:
        while waiting and len(running) < slots:
            group, tokens = waiting.pop(0)
            running.append([group, tokens])
        now_s += CURVE.step_s(len(running))
        for response in running:
            response[1] -= 1
            if not response[1]:
                ends[response[0]] = now_s
        running = [response for response in running if response[1]]
    return ends


@given(LENGTHS, st.integers(1, 8), st.floats(0, 100))
def test_groups_end_as_in_a_simulation_token_by_token(lengths, slots, start_s):
    member = Member(pool="rollout", step_time=CURVE, responses_max=slots, start_s=start_s)
    found = group_ends_s(np.array(lengths, dtype=float), range(len(lengths)), member)
    assert found == pytest.approx([start_s + end_s for end_s in token_by_token(lengths, slots)])
    flat = np.array(lengths, dtype=float).ravel()
    assert found.max() == pytest.approx(start_s + member_time_s(flat, CURVE, slots))


def test_a_bounded_batch_counts():
    member = Member(pool="rollout", step_time=CURVE, responses_max=8)
    lengths = np.array([[4.0, 4.0], [4.0, 4.0]])
    assert group_ends_s(lengths, [1, 0], member, 2).tolist() == pytest.approx(token_by_token([[4, 4], [4, 4]], 2))


def test_training_ends_after_the_last_group_or_when_it_was_busy_all_the_time():
    tokens = np.array([1.0, 1.0, 2.0])
    assert streamed_s(np.array([0.0, 0.0, 0.0]), tokens, 8.0) == 8.0
    # The last group, a quarter of the tokens, is all that is left.
    assert streamed_s(np.array([1.0, 100.0, 2.0]), tokens, 8.0) == 102.0
    # All end together: training follows generation.
    assert streamed_s(np.array([50.0, 50.0, 50.0]), tokens, 8.0) == 58.0


def test_training_in_the_order_of_numbers_waits_for_the_first():
    ends, tokens = np.array([50.0, 1.0]), np.array([1.0, 1.0])
    assert streamed_s(ends, tokens, 8.0) == 54.0
    assert streamed_s(ends, tokens, 8.0, np.array([0, 1])) == 58.0


def test_long_then_short():
    assert long_then_short((9, 8, 7, 6, 5), 0.3) == (9, 8, 5, 6, 7)
    assert long_then_short((9, 8, 7), 1.0) == (9, 8, 7)
    assert long_then_short((), 0.3) == ()
