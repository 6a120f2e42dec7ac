import os
import signal
import subprocess
import sys
import time

import pytest

from resources.process import descendants, started_at_s, tied
from tests.processes import are_gone, wait_until


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


def test_a_tied_command_is_the_child_itself_with_its_own_exit_status():
    command = tied(["/bin/sh", "-c", "echo $$ $PPID; exit 7"])
    shown = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (7, "")
    assert int(shown.stdout.split()[1]) == os.getpid()


def test_a_tied_child_gets_a_notice_when_its_parent_is_killed():
    child = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('noticed', flush=True)));"
    )
    child += "print('up', flush=True); time.sleep(600)"
    script = "import subprocess, sys; from resources.process import tied\n"
    script += f"subprocess.run(tied([sys.executable, '-c', {child!r}]))"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    found = descendants(parent.pid)
    parent.kill()
    assert parent.stdout.readline() == b"noticed\n"
    wait_until(lambda: are_gone(found))
    parent.communicate()


def test_who_comes_after_its_parent_has_died_does_not_begin():
    command = tied(["/bin/echo", "begun"])
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, check=False, capture_output=True, text=True).stdout == ""
