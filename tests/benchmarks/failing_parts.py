"""Parts of benchmarks.gpu that fail, for tests of what a failure costs the others. See test_gpu_failures."""

import os
import signal
import subprocess
import sys
import time


def write(text):
    os.write(1, text.encode())


def hangs(_size):
    """Has one figure, then hangs with a child, and heeds no signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    write(f"child {child.pid}\n")
    yield {"chosen": 4096, "child": child.pid}
    time.sleep(600)


def crashes(_size):
    yield {"chosen": 2048}
    os.kill(os.getpid(), signal.SIGKILL)


def breaks_down(_size):
    raise RuntimeError("no such kernel")


def floods(_size):
    """Its output ends in the middle of a line that looks like a figure."""
    write("x" * 1_000_000 + "\n## half a fig")
    yield {"chosen": 1024}


if __name__ == "__main__":  # an arm that does not answer
    sys.stdin.read()
