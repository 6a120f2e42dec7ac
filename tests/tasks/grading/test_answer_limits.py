"""The limits of a verifier's answers, in processes of their own."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def ran(*lines: str) -> subprocess.CompletedProcess[str]:
    script = "\n".join(("from tasks.grading.answer_limits import *", *lines))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)


def test_a_loop_and_a_match_are_interrupted_and_the_process_goes_on():
    done = ran(
        "import re",
        "for spin in (lambda: [0 for _ in iter(int, 1)], lambda: re.fullmatch('(a+)+b', 'a' * 60)):",
        "    try:",
        "        with limited_time(0.2): spin()",
        "    except OutOfTime: print('interrupted')",
        "with limited_time(0.01): pass",
        "import time; time.sleep(0.1); print('not later')",
    )
    assert done.stdout.split("\n") == ["interrupted", "interrupted", "not later", ""], done.stderr


def test_a_computation_that_cannot_be_interrupted_ends_a_process_that_nobody_watches():
    done = ran("with limited_time(0.1): sum(range(10 ** 13))")
    assert done.returncode == -signal.SIGPROF


def test_memory_beyond_the_limit_is_an_error_and_below_it_is_there():
    done = ran(
        "limit_memory()",
        "print(len(bytearray(200 << 20)) >> 20)",
        "try: bytearray(2 << 30)",
        "except MemoryError: print('refused')",
    )
    assert done.stdout.split() == ["200", "refused"], done.stderr
