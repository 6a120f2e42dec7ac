"""TRL's GRPOTrainer whose completions come from a run's members: TRL's own script, and one line of Gleaner's.

    python examples/trl_grpo.py --model MODEL --run-url DIRECTORY --prompts prompts.jsonl

Needs trl 1.16. Each machine that shall generate runs `gleaner join DIRECTORY`. The prompts are JSON lines with
`prompt` and `answer`. The same command again goes on from TRL's last checkpoint.
"""

import argparse
from pathlib import Path
from typing import Any

import gleaner

GENERATIONS, LENGTH = 8, 256


def accuracy(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for a completion that ends with the answer of its row, else 0."""
    return [float(each.strip().endswith(wanted)) for each, wanted in zip(completions, answer, strict=True)]


def configuration(model: str, run_url: str) -> dict[str, Any]:
    """The run: who generates, and from what; TRL has the prompts, the rewards and the update."""
    return {
        "run": {"url": run_url, "num_generations": GENERATIONS},
        "policy": {"path": model},
        "data": {"source": "submitted"},
        "rewards": [],
        "sampling": {"max_completion_length": LENGTH},
        "trainer": {"placement": "external"},
    }


def main() -> None:
    """Train, from TRL's last checkpoint if there is one."""
    # TRL is not among this project's dependencies.
    from datasets import load_dataset  # noqa: PLC0415
    from transformers.trainer_utils import get_last_checkpoint  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer  # noqa: PLC0415

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--run-url", "--prompts"):
        options.add_argument(name, required=True)
    options.add_argument("--output", default="trl_output")
    options.add_argument("--steps", type=int, default=100)
    given = options.parse_args()
    arguments = GRPOConfig(
        output_dir=given.output,
        max_steps=given.steps,
        num_generations=GENERATIONS,
        max_completion_length=LENGTH,
        save_steps=1,
        save_total_limit=2,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=accuracy,
        args=arguments,
        train_dataset=load_dataset("json", data_files=given.prompts, split="train"),
        rollout_func=gleaner.trl.rollout_func(configuration(given.model, given.run_url)),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(given.output) if Path(given.output).is_dir() else None)


if __name__ == "__main__":
    main()
