"""What a child of `resources.user_process` does when its parent is gone; its other parts are tested by their users."""

import os
import subprocess
import sys

import pytest

ANSWERS = """
import os, threading, time
from resources.user_process import Replies
reader, writer = os.pipe()
replies = Replies(os.fdopen(writer, "wb"))
os.close(reader)
{answers}
time.sleep(60)
raise SystemExit("went on")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "answers", ['replies.send({"a": 1})', 'threading.Thread(target=replies.send, args=({"a": 1},)).start()']
)
def test_a_child_whose_parent_is_gone_ends_without_a_word(answers: str):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", ANSWERS.format(answers=answers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
