"""`make demo-real`: a real pretrained model learns to add by `pyflyte run` on this machine, and a slot is killed.

SmolLM2-135M-Instruct is asked for sums of two numbers of two digits by its chat template, and the reward `math` grades
its answers. The killed iteration is compared with an undisturbed rollout of the same plan. On a GPU the reward rises
within the 40 iterations. Without one, few and small iterations show that a real model runs, and no more.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from examples.demo import console, report, train
from examples.real_model import make_real_model
from tasks.preparing.local_training import ROOT

CONFIG = ROOT / "examples" / "real_demo.yaml"
ITERATIONS_ON_GPU, ITERATIONS_ON_CPU = 40, 3
ITERATION_KILLED = 1
# 32 responses of an iteration are what two cores generate and train in about a minute.
ON_CPU: Mapping[str, Mapping[str, Any]] = {
    "run": {"num_prompts_per_step": 8, "num_generations": 4},
    "trainer": {"dtype": "float32"},
}
PROBLEMS = 4000
# Two sums that the chat has already: they show the form of an answer that `math` reads. With them, about every fifth
# sample of the untrained model is right, and without them none of 160.
SHOWN = ((23, 41), (35, 19))


def has_gpu() -> bool:
    """Whether torch finds a GPU here."""
    import torch  # noqa: PLC0415 - takes seconds

    return torch.cuda.is_available()


def write_problems(path: Path) -> None:
    """Write PROBLEMS chats that end with a question, each with its sum as `answer`."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(10, 100), numbers.randrange(10, 100)) for _ in range(PROBLEMS)]
    shown = [turn for first, second in SHOWN for turn in (_question(first, second), _answer(first + second))]
    rows = [{"prompt": [*shown, _question(*pair)], "answer": str(sum(pair))} for pair in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _question(first: int, second: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {first} + {second}?"}


def _answer(total: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"The answer is {total}."}


def write_settings(path: Path, run: Path, model: Path, problems: Path, *, on_gpu: bool) -> None:
    """Write examples/real_demo.yaml for this run, model and data; less of everything without a GPU."""
    settings: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    settings["run"]["url"] = str(run)
    settings["policy"]["path"] = str(model)
    settings["data"]["source"] = str(problems)
    for section, values in () if on_gpu else ON_CPU.items():
        settings[section] |= values
    path.write_text(yaml.safe_dump(settings, sort_keys=False))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a real pretrained model on this machine, and kill a slot.")
    parser.add_argument(
        "--iterations", type=int, help=f"{ITERATIONS_ON_GPU} with a GPU, {ITERATIONS_ON_CPU} without one"
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "runs")
    arguments = parser.parse_args()
    directory: Path = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    model, problems = directory / "smollm2-135m-instruct", directory / "additions.jsonl"
    on_gpu = has_gpu()
    iterations = arguments.iterations or (ITERATIONS_ON_GPU if on_gpu else ITERATIONS_ON_CPU)
    console.print(_expectation(iterations, on_gpu))
    started_s = time.monotonic()
    if not model.exists():
        console.print(f"policy: making {model}, half a minute")
        make_real_model(model)
    write_problems(problems)
    run = Path(tempfile.mkdtemp(prefix=time.strftime("demo-real-%Y%m%d-%H%M%S-"), dir=directory))
    config, log = run.with_suffix(".yaml"), run.with_suffix(".log")
    write_settings(config, run, model, problems, on_gpu=on_gpu)
    kill = train(config, run, iterations, log, ITERATION_KILLED)
    outcome = report(run, kill, log, "torch", CONFIG)
    passed = outcome.is_identical and (outcome.has_risen or not on_gpu)
    console.print(f"{'all good' if passed else 'NOT as promised'}, {time.monotonic() - started_s:.0f} s")
    sys.exit(not passed)


def _expectation(iterations: int, on_gpu: bool) -> str:
    if on_gpu:
        return f"{iterations} iterations of 512 responses on this machine's GPU; a second member shares it"
    return (
        f"{iterations} iterations of 32 responses without a GPU: about a minute each on two idle cores, and 5 GB on "
        "disk in all; too few for the reward to rise"
    )


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as error:
        sys.exit(f"demo-real: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
