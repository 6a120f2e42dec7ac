"""The end at a notice, with real processes and signals; as PID 1 where this user may make PID namespaces."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from resources.ending import ends_on_notice
from resources.notice import EXIT_CODE
from resources.process import descendants
from tests.processes import PID_1, are_gone, first_process, wait_until

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
# A main thread in native code that no signal interrupts: a mutex that it has locked already.
NATIVE = """
    import ctypes
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)
"""
# A library's own handler, and a body that makes of it what flytekit makes of torch's: an end as if all were well.
ANOTHER_HANDLER = """
    import signal
    def raises(*_):
        raise InterruptedError
    signal.signal(signal.SIGTERM, raises)
    try:
        print("ready", flush=True)
        time.sleep(600)
    except InterruptedError:
        pass
"""
PLAIN = """
    print("ready", flush=True)
    time.sleep(600)
"""
# A child in a session of its own, with a child, neither of which would heed the signal; and one that restarts them.
CHILDREN = """
    import subprocess, sys
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    deaf += "time.sleep(600)"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    while True:
        command = [sys.executable, "-c", child, deaf]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
            process.stdout.readline()
            print("ready", flush=True)
            process.wait()
"""


def start(body: str, *, as_pid_1: bool = False) -> "subprocess.Popen[str]":
    """A process that is inside the block, and does `body` there."""
    inside = textwrap.indent(textwrap.dedent(body), "    ")
    program = f"import time\nfrom resources.ending import ends_on_notice\nwith ends_on_notice():\n{inside}\n"
    command = [*(PID_1 if as_pid_1 else []), sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        pytest.fail(process.communicate(timeout=LIMIT_S)[1])
    return process


@pytest.mark.slow
@pytest.mark.parametrize("as_pid_1", [False, True])
@pytest.mark.parametrize("body", [PLAIN, NATIVE, ANOTHER_HANDLER, CHILDREN])
def test_it_ends_at_once_with_all_it_has_started(body, as_pid_1):
    if as_pid_1 and not PID_1:
        pytest.skip("this user may not make PID namespaces")
    process = start(body, as_pid_1=as_pid_1)
    started = descendants(process.pid)
    assert body is not CHILDREN or len(started) >= 2
    os.kill(first_process(process.pid, as_pid_1=as_pid_1), signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == EXIT_CODE
    assert errors.startswith("notice (SIGTERM): ")
    wait_until(lambda: are_gone(started))


FORKS = """
    import os, signal
    for pause_s in (0, 0, 0, 0.1):
        child = os.fork()
        if not child:
            time.sleep(600)
        time.sleep(pause_s)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        os.kill(os.getpid(), signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    time.sleep(0.2)
    print("ready", flush=True)
"""


@pytest.mark.slow
def test_a_child_that_is_forked_ends_alone():
    process = start(FORKS)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (0, "")


# A child that looks which pipes it has of those that the block has opened, and one that leaves the block.
CHILDREN_OF_FORKS = """
    import os
    def pipes():
        links = []
        for each in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{each}"))
            except FileNotFoundError:
                pass  # of the listing itself
        return {each for each in links if each.startswith("pipe:")}
    from resources import ending
    [(reader, writer)] = ending._pipes
    of_block = {os.readlink(f"/proc/self/fd/{each}") for each in (reader, writer)}
    assert of_block <= pipes()
    child = os.fork()
    if not child:
        os._exit(len(of_block & pipes()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    child = os.fork()
    if not child:
        raise SystemExit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@pytest.mark.slow
def test_a_child_that_is_forked_keeps_nothing_of_the_block_and_may_leave_it():
    process = start(CHILDREN_OF_FORKS + NATIVE)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == EXIT_CODE
    assert errors.startswith("notice (SIGTERM): ")


def test_after_the_block_all_is_as_before_it():
    seen: list[int] = []
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    before_writer = signal.set_wakeup_fd(writer)
    try:
        with ends_on_notice(), ends_on_notice():
            os.kill(os.getpid(), signal.SIGWINCH)  # other signals change nothing
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        assert signal.set_wakeup_fd(before_writer) == writer
        assert not [thread for thread in threading.enumerate() if thread.name == "notice"]
    finally:
        signal.set_wakeup_fd(before_writer)
        signal.signal(signal.SIGTERM, before)
        os.close(reader)
        os.close(writer)


def test_what_the_block_raises_and_returns_comes_through():
    @ends_on_notice()
    def halved(number: int) -> int:
        if number % 2:
            raise ValueError(f"{number} is odd")
        return number // 2

    assert halved(4) == 2
    with pytest.raises(ValueError, match="3 is odd"):
        halved(3)
    assert halved(2) == 1


def test_in_another_thread_nothing_changes():
    handlers = []

    def run() -> None:
        with ends_on_notice():
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [before]
