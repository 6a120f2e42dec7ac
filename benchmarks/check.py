"""What `gleaner check --files` costs on the demo and on a data set of 7,500 rows, against another checkout.

Each round checks the same files with each checkout, a process each: the generated problems of examples/demo.yaml, rows
of text, and rows of chat messages. The model check, which builds the model's modules in a child process, is left out in
both: `check` prints its seconds apart.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.reporting import Measured, finish, interleave, measured, ratios
from examples.warm_start import build_model, build_tokenizer

HERE = Path(__file__).resolve().parents[1]
ROWS = 7500
# As long as a question of school mathematics: about 240 characters.
QUESTION = (
    "A farm sells {0} boxes of apples on each of {1} days, and every box holds {2} apples. "
    "On the last day {1} boxes come back. How many apples were sold in all, and how many came back? "
    "Write down every step of the working before the answer."
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
BOUND = "<= 1.3"
TIME_LIMIT_S = 600
# Prints the processor seconds of itself and its children, without those of the model check.
PROGRAM = """
import json, resource, sys
import tasks.preparing.checks as checks
from click.testing import CliRunner
from gleaner import main
if hasattr(checks, "check_model_use"):
    checks.check_model_use = lambda *given: None
done = CliRunner().invoke(main, ["check", "--files", sys.argv[1]])
if done.exit_code:
    sys.exit(done.output)
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps(sum(one.ru_utime + one.ru_stime for one in used)))
"""


def write_inputs(directory: Path) -> dict[str, Path]:
    """A tiny model, and by kind of prompt the configuration of a run on it."""
    model = directory / "model"
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    build_model(len(tokenizer)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    demo = {"source": "arithmetic", "limit": 4096}
    documents = {"demo": config_of(directory / "run", model, demo, "arithmetic")}
    for kind in ("texts", "chats"):
        rows = directory / f"{kind}.jsonl"
        with rows.open("w") as file:
            for number in range(ROWS):
                text = QUESTION.format(number % 97 + 2, number % 13 + 2, number)
                prompt = [{"role": "user", "content": text}] if kind == "chats" else text
                file.write(json.dumps({"prompt": prompt, "answer": str(number)}) + "\n")
        documents[kind] = config_of(directory / "run", model, {"source": str(rows)}, "math")
    configs = {kind: directory / f"{kind}.json" for kind in documents}
    for kind, config in configs.items():
        config.write_text(json.dumps(documents[kind]))
    return configs


def config_of(run: Path, model: Path, data: Mapping[str, object], reward: str) -> dict[str, object]:
    """The configuration of a run that is never begun."""
    return {
        "run": {"url": str(run), "seed": 3, "num_prompts_per_step": 8, "num_generations": 4},
        "policy": {"path": str(model)},
        "data": data,
        "rewards": [{"function": reward}],
        "sampling": {"max_completion_length": 24},
        "rollout": {"engine": "torch", "context_length": 512},
        "pools": {"rollout": {"count": 1}},
    }


def check_s(tree: Path, config: Path) -> float:
    """The processor seconds of one `gleaner check --files` by the checkout `tree`; raises RuntimeError if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(config)],
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"check of {config.name} by {tree} ended with {done.returncode}:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(trees: Mapping[str, Path], rounds: int) -> dict[str, dict[str, list[float]]]:
    """By kind of prompt, by checkout: processor seconds, in the order of the rounds."""
    with tempfile.TemporaryDirectory(prefix="gleaner-check-") as temporary:
        configs = write_inputs(Path(temporary))
        return {
            kind: interleave({label: partial(check_s, tree, config) for label, tree in trees.items()}, rounds)
            for kind, config in configs.items()
        }


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--against", type=Path, required=True, help="another checkout, compared in turns")
    given = parser.parse_args()
    found = measure({"this": HERE, "other": given.against.resolve()}, given.rounds)
    over: dict[str, Measured] = {kind: ratios(arms["this"], arms["other"]) for kind, arms in found.items()}
    rows = [
        {"prompts": kind, **{f"{label}, CPU s": measured(arms[label]) for label in arms}, "this / other": over[kind]}
        for kind, arms in found.items()
    ]
    targets = [ratio.target(f"{kind}_over_other", BOUND) for kind, ratio in over.items()]
    finish("check", rows, targets, as_json=given.json, notes={"rounds": given.rounds, "data rows": ROWS})


if __name__ == "__main__":
    main()
