"""A program that interrupts math-verify while it loads, in a new process each time, and says what is left of it.

`interrupt` prints a line for each process; `load` prints which modules of the parser a loaded worker imports late.
"""

import contextlib
import json
import os
import sys

from tasks.grading import math_answer, worker
from tasks.grading.answer_limits import OutOfTime, limited_time
from tasks.grading.reward import GradingCase

INTERRUPTIONS = 12
ANSWERS = (("x=7", "7"), (r"\{5,6\}", r"\{6,5\}"), ("x^2+4x+4", "(x+2)^2"), (r"\sin 30^\circ", "1/2"))
PARSER = ("antlr4", "latex2sympy2_extended", "math_verify")


def grade(answer, truth):
    return math_answer.grade_mathematics(GradingCase(0, "", rf"\boxed{{{answer}}}", (1,), {"answer": truth}))


def grades_right():
    try:
        return all(grade(answer, truth) == 1.0 for answer, truth in ANSWERS)
    except Exception:  # noqa: BLE001 - a broken parser may raise anything
        return False


def interrupt(number):
    """Interrupt the first answer of this process, and tell what is left."""
    with contextlib.suppress(OutOfTime), limited_time(0.05 + 0.1 * number):
        grade("x=3", "3")
    works = worker._works(worker.BoundFunction((), False, list, verifies=True, works=math_answer.works))
    tell({"works": works, "grades_right": grades_right()})


def tell(what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main():
    if sys.argv[1] == "load":
        worker._bound("math", {})
        before = set(sys.modules)
        assert grades_right()
        tell(sorted(name for name in set(sys.modules) - before if name.startswith(PARSER)))
        return
    for number in range(INTERRUPTIONS):
        child = os.fork()
        if not child:
            interrupt(number)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
