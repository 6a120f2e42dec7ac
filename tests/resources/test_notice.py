import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from resources.notice import EXIT_CODE, PreemptionNotice


def test_sigterm_is_remembered_and_the_old_handler_comes_back():
    seen_before: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen_before.append(number))
    try:
        with PreemptionNotice() as notice:
            assert not notice.given
            os.kill(os.getpid(), signal.SIGTERM)
            assert notice.wait(300.0)
            assert notice.given
            os.kill(os.getpid(), signal.SIGTERM)  # the second notice is the first
        assert seen_before == []
        assert notice.given
        notice.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen_before == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_wait_ends_at_its_time_limit():
    with PreemptionNotice() as notice:
        started_s = time.monotonic()
        assert not notice.wait(0.05)
        assert 0.04 <= time.monotonic() - started_s < 60.0


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_wait_without_time_returns_at_once(timeout_s: float):
    with PreemptionNotice() as notice:
        assert not notice.wait(timeout_s)
        notice.give()
        assert notice.wait(timeout_s)


def test_wait_in_the_main_thread_is_interrupted_by_the_signal():
    with PreemptionNotice() as notice:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        started_s = time.monotonic()
        timer.start()
        assert notice.wait(300.0)
        assert time.monotonic() - started_s < 150.0
        timer.join()


def test_other_threads_can_wait():
    seen: list[bool] = []
    with PreemptionNotice() as notice:
        waiters = [threading.Thread(target=lambda: seen.append(notice.wait(300.0))) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        started_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        for waiter in waiters:
            waiter.join(300)
    assert seen == [True, True, True]
    assert time.monotonic() - started_s < 150.0


def test_closed_notice_does_not_block_or_change():
    notice = PreemptionNotice()
    notice.close()
    notice.give()
    assert not notice.wait(300.0)


def test_other_thread_cannot_create_one():
    errors: list[str] = []

    def create() -> None:
        try:
            PreemptionNotice()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=create, name="flusher")
    thread.start()
    thread.join()
    assert errors == ["PreemptionNotice: created in thread 'flusher'; allowed: the main thread only"]


def test_process_can_flush_and_leave_with_the_exit_code():
    program = (
        "import os\n"
        "from resources.notice import EXIT_CODE, PreemptionNotice\n"
        "notice = PreemptionNotice()\n"
        "os.write(1, b'ready')\n"
        "notice.wait()\n"
        "os.write(1, b'flushed')\n"
        "os._exit(EXIT_CODE)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        watchdog = threading.Timer(30.0, process.kill)
        watchdog.start()
        assert process.stdout is not None
        assert process.stdout.read(5) == b"ready"
        process.send_signal(signal.SIGTERM)
        flushed = process.stdout.read()
        watchdog.cancel()
    assert flushed == b"flushed"
    assert process.returncode == EXIT_CODE == 137
