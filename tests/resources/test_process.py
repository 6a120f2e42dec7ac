import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resources.process import descendants, give_back_memory, started_at_s
from tests.processes import are_gone, wait_until

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Below the size from which the C library takes memory for one object alone, and returns it with that.
PIECE_BYTES = 64 << 10


@pytest.mark.slow
def test_a_process_knows_when_it_was_started_and_not_when_it_asked():
    before = time.time()
    script = "import time; time.sleep(0.6); from resources.process import started_at_s; print(started_at_s())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert before - 0.1 <= float(done.stdout) <= time.time() - 0.5


def test_it_does_not_move():
    assert abs(started_at_s() - started_at_s()) < 0.1


def test_those_that_a_process_has_started_are_known_parents_first_and_not_those_that_have_ended():
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    script = "import subprocess; subprocess.run(['sh', '-c', 'echo up; sleep 600; true'])"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        deadline_s = time.monotonic() + 300
        while len(found := descendants(child.pid)) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        mine = descendants(os.getpid())
        for process in found:
            os.kill(process, signal.SIGKILL)
    assert len(found) == 2
    assert [each for each in mine if each in (child.pid, *found)] == [child.pid, *found]
    assert ended.pid not in mine
    ended.wait()


FORKS = """
import os, signal, sys, time
from resources.process import end_with
parent = os.getpid()
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("noticed", flush=True)))
end_with(parent + int(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
"""


def test_a_process_that_ends_with_its_parent_gets_a_notice_when_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", FORKS, "0"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    found = descendants(parent.pid)
    parent.kill()
    assert parent.stdout.readline() == b"noticed\n"
    wait_until(lambda: are_gone(found))
    parent.communicate()


def test_who_comes_after_its_parent_has_died_does_not_begin():
    done = subprocess.run([sys.executable, "-c", FORKS, "1"], check=False, capture_output=True)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, b"")


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_freed_between_pieces_in_use_goes_back():
    pieces = [bytes(PIECE_BYTES) for _ in range(4000)]
    for piece in pieces:
        assert piece[0] == 0
    held = pieces[::50]
    full = resident_bytes()
    del pieces, piece
    give_back_memory()
    assert full - resident_bytes() > 2500 * PIECE_BYTES
    assert len(held) == 80


def test_cycles_are_collected():
    class Node:
        pass

    first, second = Node(), Node()
    first.other, second.other = second, first
    seen = []
    first.end = type("End", (), {"__del__": lambda _: seen.append(True)})()
    gc.disable()
    try:
        del first, second
        assert not seen
        give_back_memory()
    finally:
        gc.enable()
    assert seen == [True]
