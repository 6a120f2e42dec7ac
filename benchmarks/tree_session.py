"""The process of a `benchmarks.unchanged` session: it trains runs by the workflow of the code on its module path.

It is started as a file, with PYTHONPATH at another commit's code, so nothing but that code's workflow is imported. Each
line of its standard input is a request: {"config": the run's configuration, "count": iterations}. It answers each with
a line, and its first line is the path of the workflow. What the workflow prints goes to standard error.
"""

import json
import os
import sys


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    from workflows import training  # noqa: PLC0415 - its prints must not be answers
    from workflows.config_input import Configuration  # noqa: PLC0415
    from workflows.count import Count  # noqa: PLC0415

    print(training.__file__, file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        training.training(config=Configuration(request["config"]), count=Count(request["count"]))
        print("trained", file=answers, flush=True)


if __name__ == "__main__":
    main()
