import subprocess
import sys
import time

from resources.process import started_at_s


def test_a_process_knows_when_it_was_started_and_not_when_it_asked():
    before = time.time()
    script = "import time; time.sleep(0.6); from resources.process import started_at_s; print(started_at_s())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert before - 0.1 <= float(done.stdout) <= time.time() - 0.5


def test_it_does_not_move():
    assert abs(started_at_s() - started_at_s()) < 0.1
