"""A wait that speaks after ten seconds, and ends."""

import math

from storage.clock import ManualClock
from storage.waiting import StoppedProcesses, Wait


def waited(clock, waiting, interval_s):
    """Until the end of the wait, or for 200 s."""
    while not waiting.is_over and clock.monotonic() < 200:
        waiting.pause(interval_s)
    return clock.monotonic()


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_it_is_silent_while_it_is_short(caplog):
    clock = ManualClock()
    assert waited(clock, Wait("a plan", clock, 9.0, "then it fails"), 0.5) == 9
    assert lines(caplog) == []


def test_it_says_what_since_when_until_when_and_what_then_and_says_it_again(caplog):
    clock = ManualClock(1000.0)
    waiting = Wait("a plan", clock, 100.0, "then it fails (trainer.group_timeout_s)")
    for _ in range(100):
        waiting.pause(1.0)
    told = lines(caplog)
    assert told[0] == (
        "waiting for a plan, since 1970-01-01 00:16:40 UTC and until 1970-01-01 00:18:20 UTC; "
        "then it fails (trainer.group_timeout_s)"
    )
    assert len(told) == 2
    assert waiting.is_over


def test_it_sleeps_no_longer_than_to_its_end():
    clock = ManualClock()
    assert waited(clock, Wait("a plan", clock, 25.0, "then it fails"), 10.0) == 25


def test_a_sign_of_life_moves_the_end_and_not_the_beginning(caplog):
    clock = ManualClock()
    waiting = Wait("a plan", clock, 20.0, "then it fails")
    clock.sleep(15.0)
    waiting.saw_life()
    assert waiting.left_s == 20
    assert waited(clock, waiting, 1.0) == 35
    assert lines(caplog)[0].startswith(
        "waiting for a plan, since 1970-01-01 00:00:00 UTC and until 1970-01-01 00:00:35"
    )


def test_what_something_else_ends_has_no_moment(caplog):
    clock = ManualClock()
    assert waited(clock, Wait("room", clock, math.inf, "Ctrl-C ends it"), 1.0) == 200
    assert lines(caplog)[0] == "waiting for room, since 1970-01-01 00:00:00 UTC; Ctrl-C ends it"


def test_an_end_behind_the_last_year_of_a_calendar_ends_nothing(caplog):
    clock = ManualClock()
    assert waited(clock, Wait("groups", clock, 1e12, "then it fails"), 1.0) == 200
    assert "and until 9999-12-31 23:59:59 UTC; then it fails" in lines(caplog)[0]


def test_stopped_processes_have_a_limit_of_their_own_each_time_that_they_stop(caplog):
    clock = ManualClock()
    waiting = StoppedProcesses(clock, "they are killed", 20.0)
    assert waiting.given_up({}) is None
    for stopped in ({"rank 1": 7}, {}, {"rank 1": 7}):
        for _ in range(19):
            assert waiting.given_up(stopped) is None
            clock.sleep(1.0)
    assert waiting.given_up({"rank 1": 7}) is None
    clock.sleep(1.0)
    assert waiting.given_up({"rank 1": 7}) == "rank 1 (process 7) was stopped by a signal for 20 s"
    assert lines(caplog) == [
        "waiting for rank 1 (process 7), which a signal has stopped (state T), since 1970-01-01 00:00:"
        f"{since} UTC and until 1970-01-01 00:00:{until} UTC; then they are killed; `kill -CONT 7` lets what is "
        "stopped go on"
        for since, until in (("00", "20"), ("38", "58"))
    ]
