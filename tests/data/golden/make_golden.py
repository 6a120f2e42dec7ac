"""Writes the golden values: small random batches, and what TRL and verl make of them, in float64.

Run it where both packages are installed in these versions, which is not the project's own environment:

    python3.11 -m venv /tmp/peers
    /tmp/peers/bin/pip install -c constraints.txt '.[dev]' trl==1.16.0
    /tmp/peers/bin/pip install --no-deps verl==0.9.1
    /tmp/peers/bin/pip install ray codetiming hydra-core torchdata orjson tensordict omegaconf aiohttp
    /tmp/peers/bin/python tests/data/golden/make_golden.py

There `pytest -m peers` derives the values again and compares. verl asks for older transformers, hence --no-deps; what
is imported of it works.

What there is one of per token is written as one list per response, without padding. The versions are exact because
TRL's private methods are called.
"""

import argparse
import asyncio
import hashlib
import json
import re
from importlib.metadata import version
from pathlib import Path

import torch
import trl_values
import verl_values
from golden_batch import CAP, MAX_COMPLETION_LENGTH, SEED, Batch, Golden

HERE = Path(__file__).parent
VERSIONS = {"trl": "1.16.0", "verl": "0.9.1"}


def advantage_golden(batch: Batch) -> Golden:
    # Ordinary rewards, a group of equal ones, and one whose spread is small enough for eps to show.
    outcome = {
        "num_generations": 4,
        "rewards": [*torch.randn(4, generator=batch.generator).tolist(), *[0.1] * 4, 1.0, 1.0, 1.0, 1.0002],
    }
    return {
        "outcome": {
            "inputs": outcome,
            "cases": verl_values.outcome_advantages(outcome) + trl_values.outcome_advantages(outcome),
        },
        "token": {"inputs": batch.inputs("token_rewards", "values"), "cases": verl_values.token_advantages(batch)},
    }


def overlong_golden() -> Golden:
    lengths, buffer_length = list(range(1, MAX_COMPLETION_LENGTH + 1)), 5
    cases = [{"peer": "trl", "penalty_factor": 1.0, "penalties": trl_values.overlong(lengths, buffer_length)}]
    for factor in (1.0, 0.5):
        penalties = asyncio.run(verl_values.overlong(lengths, buffer_length, factor))
        cases.append({"peer": "verl", "penalty_factor": factor, "penalties": penalties})
    inputs = {"lengths": lengths, "max_completion_length": MAX_COMPLETION_LENGTH, "buffer_length": buffer_length}
    return {"inputs": inputs, "cases": cases}


def golden() -> dict[str, Golden]:
    """The contents of all files, by their stems."""
    batch = Batch()
    policy = batch.inputs("logprobs", "old_logprobs", "reference_logprobs", "advantages")
    policy |= batch.inputs("sampler_logprobs") | {"max_completion_length": MAX_COMPLETION_LENGTH, "cap": CAP}
    ratios = batch.inputs("old_logprobs", "sampler_logprobs")
    kl = batch.inputs("logprobs", "reference_logprobs", "rewards")
    value = batch.inputs("values", "old_values") | {"max_completion_length": MAX_COMPLETION_LENGTH}
    return {
        "advantages": advantage_golden(batch),
        "policy_losses": {
            "inputs": policy,
            "cases": verl_values.policy_losses(batch) + trl_values.policy_losses(batch),
        },
        "kl": {"inputs": kl, "cases": verl_values.kl(batch), "in_reward": verl_values.kl_in_reward(batch)},
        "value_losses": {"inputs": value, "cases": verl_values.value_losses(batch)},
        "importance_weights": {
            "inputs": ratios,
            "cases": verl_values.importance_weights(batch) + trl_values.importance_weights(batch),
        },
        "overlong": overlong_golden(),
    }


def sources_sha256() -> str:
    """Of the Python files of this folder, one after the other by name."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HERE.glob("*.py")))).hexdigest()


def main() -> None:
    """Writes one JSON file per subject.

    Raises:
        SystemExit: Another version of a peer is installed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="the folder to write to")
    out = parser.parse_args().out
    for package, wanted in VERSIONS.items():
        if version(package) != wanted:
            raise SystemExit(f"{package}: version {version(package)}; allowed: {wanted}")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    made_by = VERSIONS | {"torch": version("torch"), "seed": SEED, "sources_sha256": sources_sha256()}
    for stem, contents in golden().items():
        text = json.dumps({"made_by": made_by} | contents, indent=1)
        # One list of numbers per line.
        text = re.sub(r"\[[^][{}\"]*\]", lambda match: " ".join(match[0].split()), text)
        (out / f"{stem}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
