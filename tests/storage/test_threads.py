import threading
import time

import pytest

from storage.threads import in_threads


class Ended(BaseException):
    pass


def test_results_are_in_the_order_of_the_items():
    def work(number: int) -> int:
        time.sleep(0.002 * (9 - number))
        return number * number

    assert in_threads(4, work, range(10)) == [number * number for number in range(10)]
    assert in_threads(4, work, []) == []


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, Ended])
def test_after_an_error_nothing_more_is_begun(error):
    begun = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise error
        time.sleep(0.02)

    with pytest.raises(error):
        in_threads(2, work, range(10_000))
    assert len(begun) < 5_000


@pytest.mark.slow
def test_a_check_ends_it_from_the_callers_thread_and_no_thread_is_left():
    before = threading.active_count()
    begun, checked = [], []

    def work(number: int) -> None:
        begun.append(number)
        time.sleep(0.05)

    def check() -> None:
        checked.append(threading.current_thread())
        if len(checked) == 3:
            raise Ended

    with pytest.raises(Ended):
        in_threads(2, work, range(1000), check)
    assert set(checked) == {threading.current_thread()}
    assert 2 <= len(begun) < 500
    assert threading.active_count() == before
