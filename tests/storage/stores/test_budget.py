"""How the time of a call is divided among its attempts."""

import pytest

from storage.stores import budget
from storage.stores.budget import BYTES_PER_S_MIN, Budget


class ByHand:
    """A clock that stands until a test moves it, or a pause does."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s

    def sleep(self, duration_s):
        self.now_s += duration_s


@pytest.fixture
def time(monkeypatch):
    clock = ByHand()
    monkeypatch.setattr(budget, "time", clock)
    return clock


def test_an_attempt_has_half_of_the_deadline_so_that_another_can_follow_one_that_says_nothing(time):
    call = Budget(20.0, 0)
    call.begin_attempt()
    assert call.attempt_left_s == 10.0
    time.now_s += 10.0
    assert (call.attempt_left_s, call.left_s) == (0.0, 10.0)
    call.begin_attempt()
    assert call.attempt_left_s == 10.0
    time.now_s += 4.0
    call.begin_attempt()
    assert call.attempt_left_s == call.left_s == 6.0, "no attempt outlives the call"


def test_the_bytes_of_a_body_add_their_time_to_the_attempt_and_to_the_call(time):
    call = Budget(20.0, 3 * BYTES_PER_S_MIN)
    call.begin_attempt()
    assert (call.attempt_left_s, call.left_s) == (13.0, 23.0)
    time.now_s += 13.0
    call.carry(BYTES_PER_S_MIN)
    assert (call.attempt_left_s, call.left_s) == (-2.0, 8.0)


def test_bytes_for_less_than_a_second_count_too(time):
    call = Budget(20.0, BYTES_PER_S_MIN // 4)
    call.begin_attempt()
    assert (call.attempt_left_s, call.left_s) == (10.25, 20.25)
    call.carry(5 * BYTES_PER_S_MIN // 2)
    assert (call.attempt_left_s, call.left_s) == (12.5, 22.5)


def test_a_pause_never_uses_up_the_deadline(time, monkeypatch):
    monkeypatch.setattr(budget.random, "uniform", lambda _, most_s: most_s)
    call = Budget(4.0, 0)
    call.begin_attempt()
    assert call.pause(1.0)
    assert call.left_s == 3.0
    call.begin_attempt()
    assert call.pause(1.0)
    call.begin_attempt()
    assert not call.pause(1.0)
    assert call.left_s == 1.0
