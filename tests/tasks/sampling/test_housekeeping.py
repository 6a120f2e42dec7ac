import threading
import time

import pytest

from storage.clock import ManualClock, SystemClock
from tasks.sampling.housekeeping import Housekeeping


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


def test_a_thread_keeps_its_interval_although_the_work_takes_time():
    moments, done = [], threading.Event()

    def work():
        moments.append(time.monotonic())
        time.sleep(0.03)
        if len(moments) == 8:
            done.set()

    keeping = Housekeeping(work, SystemClock(), interval_s=0.05, background=True)
    keeping.start()
    assert done.wait(10)
    keeping.stop()
    assert moments[-1] - moments[0] < 7 * 0.079  # 0.05 each and not 0.08


@pytest.mark.parametrize("background", [True, False])
def test_an_error_of_the_work_reaches_the_decode_loop(background):
    clock = SystemClock()

    def work():
        raise ValueError("broken")

    keeping = Housekeeping(work, clock, interval_s=0.001, background=background)
    keeping.start()
    with pytest.raises(ValueError, match="broken"):
        tick_often(keeping, lambda: time.sleep(0.002))
