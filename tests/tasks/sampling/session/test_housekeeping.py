import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.clock import ManualClock, SystemClock
from tasks.sampling.session.housekeeping import Housekeeping, begins_s


def tick_often(keeping, wait):
    for _ in range(1000):
        wait()
        keeping.tick()


def test_in_line_it_works_when_due_and_only_then():
    clock, calls = ManualClock(), []
    keeping = Housekeeping(lambda: calls.append(clock.monotonic()), clock, interval_s=5.0, background=False)
    keeping.start()
    for _ in range(12):
        clock.advance(1.0)
        keeping.tick()
    assert calls == [5.0, 10.0]


@given(st.floats(0, 1e6), st.floats(0.001, 100), st.floats(0, 1))
def test_the_work_ends_within_an_interval_even_if_it_takes_twice_as_long_as_the_last_time(began_s, interval_s, share):
    took_s = share * interval_s / 4
    begins = begins_s(began_s, took_s, interval_s)
    assert begins + 2 * took_s <= began_s + interval_s + 1e-6
    assert begins >= began_s + interval_s / 2 - 1e-6  # however long it takes, it does not begin twice as often


def test_a_thread_does_the_work_again_and_again():
    moments, done = [], threading.Event()

    def work():
        moments.append(len(moments))
        if len(moments) == 8:
            done.set()

    keeping = Housekeeping(work, SystemClock(), interval_s=0.01, background=True)
    keeping.start()
    assert done.wait(300)
    keeping.stop()
    assert len(moments) >= 8


@pytest.mark.parametrize("background", [True, False])
def test_an_error_of_the_work_reaches_the_decode_loop(background):
    clock = SystemClock()

    def work():
        raise ValueError("broken")

    keeping = Housekeeping(work, clock, interval_s=0.001, background=background)
    keeping.start()
    with pytest.raises(ValueError, match="broken"):
        tick_often(keeping, lambda: time.sleep(0.002))
