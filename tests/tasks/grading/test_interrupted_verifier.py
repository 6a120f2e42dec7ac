"""An interruption of math-verify while it loads breaks it: it is loaded beforehand, and looked at afterwards."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.grading.binding import BoundFunction
from tasks.grading.worker import _grade, _works
from tests.tasks.grading.interrupted_loads import INTERRUPTIONS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


def program(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tasks.grading.interrupted_loads", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_verifier_that_was_interrupted_while_it_loaded_says_whether_it_still_works():
    found = [json.loads(line) for line in program("interrupt")]
    assert len(found) == INTERRUPTIONS
    assert [each["works"] for each in found] == [each["grades_right"] for each in found]


def test_a_loaded_worker_loads_no_part_of_the_parser_with_its_first_answer():
    assert program("load") == ["[]"]


def sleep_long(_cases):
    time.sleep(60)
    return 1.0


def raise_at_once(_cases):
    raise MemoryError


@pytest.mark.parametrize(("call", "told"), [(sleep_long, "hung"), (raise_at_once, "outcomes")])
@pytest.mark.parametrize("works", [True, False])
def test_a_process_that_no_longer_works_is_given_up_with_the_answer(call, told, works):
    bound = BoundFunction((), False, call, verifies=True, works=lambda: works)
    reply = _grade(bound, [None], 0.2)
    assert told in reply
    assert reply["spoiled"] is not works


def test_a_verifier_that_raises_when_it_is_looked_at_does_not_work():
    def broken():
        raise KeyError("no parser")

    assert not _works(BoundFunction((), False, raise_at_once, verifies=True, works=broken))
