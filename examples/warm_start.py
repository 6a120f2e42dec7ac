"""Make the demo's policy: a tiny Qwen2 trained on worked sums with noisy steps, which GRPO can then improve.

Usage: python examples/warm_start.py DIRECTORY [--steps N] [--seed N]
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tasks.configuration.data import ArithmeticConfig
from tasks.prompts.arithmetic import ALPHABET, demonstration, problem

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
STEP_NOISE = 0.2  # with it, about 40 % of sampled answers are right, and most groups have mixed rewards
WARM_UP_STEPS = 20
PROBLEMS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The settings of the supervised training before reinforcement learning, and the width and depth of the model."""

    steps: int = 400
    batch: int = 64
    learning_rate: float = 1e-3
    seed: int = 1
    task: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    step_noise: float = STEP_NOISE
    hidden_size: int = 128
    layers: int = 2


def build_tokenizer(alphabet: str = ALPHABET) -> Any:
    """A tokenizer with one token per character; a prompt begins with <bos>."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def build_model(vocabulary: int, context_length: int = 2048, hidden_size: int = 128, layers: int = 2) -> Any:
    """A random Qwen2, by default with 0.4 million parameters."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Qwen2ForCausalLM(config)


def worked_examples(config: WarmStart) -> Iterator[tuple[str, str]]:
    """Endless prompts, each with a worked answer; each `config.batch` consecutive ones are of similar length."""
    rng = random.Random(config.seed)
    while True:
        # The seed differs from any run's, so that the problems here are not the run's prompts.
        indices = [rng.randrange(PROBLEMS) for _ in range(config.batch * 8)]
        pool = [problem(config.seed + 1_000_003, index, config.task) for index in indices]
        texts = sorted(
            ((p.prompt, demonstration(p, rng, config.step_noise)) for p in pool), key=lambda text: len(text[1])
        )
        chunks = [texts[start : start + config.batch] for start in range(0, len(texts), config.batch)]
        rng.shuffle(chunks)
        for chunk in chunks:
            yield from chunk


def write_examples(file: Path, config: WarmStart) -> None:
    """Write the worked examples of all steps as a data set of `algorithm.kind: sft`, in the order of the steps."""
    texts = islice(worked_examples(config), config.steps * config.batch)
    rows = (json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in texts)
    file.write_text("".join(rows), encoding="utf-8")


def save_random(directory: Path, config: WarmStart) -> None:
    """Save the tokenizer, and a model of random weights, as one Hugging Face directory."""
    tokenizer = build_tokenizer()
    torch.manual_seed(config.seed)
    model = build_model(len(tokenizer), hidden_size=config.hidden_size, layers=config.layers)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def batches(tokenizer: Any, config: WarmStart) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches (ids [B, L], labels [B, L]) of worked examples, without loss on prompts."""
    texts = worked_examples(config)
    while True:
        rows = []
        for prompt, answer in islice(texts, config.batch):
            asked = tokenizer(prompt)["input_ids"]
            said = [*tokenizer(answer, add_special_tokens=False)["input_ids"], 2]
            rows.append((asked + said, [False] * len(asked) + [True] * len(said)))
        yield padded(rows)


def padded(rows: Sequence[tuple[list[int], list[bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch (ids [B, L], labels [B, L]) of rows of tokens, each with whether it is learned."""
    width = max(len(ids) for ids, _ in rows)
    labels = [[token if own else -100 for token, own in zip(ids, learned, strict=True)] for ids, learned in rows]
    ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in rows])
    return ids, torch.tensor([[*row, *[-100] * (width - len(row))] for row in labels])


def warm_start(directory: Path, config: WarmStart, progress: Callable[[int, float], None]) -> None:
    """Train from random weights on noisy demonstrations and save model and tokenizer as one Hugging Face directory."""
    tokenizer = build_tokenizer()
    train_policy(directory, tokenizer, batches(tokenizer, config), config, progress)


def train_policy(
    directory: Path,
    tokenizer: Any,
    source: Iterator[tuple[torch.Tensor, torch.Tensor]],
    config: WarmStart,
    progress: Callable[[int, float], None],
) -> None:
    """Train a policy from random weights on batches (ids, labels), and save it and its tokenizer."""
    # A run with `algorithm.kind: sft` takes 1.4 times the CPU seconds for as many steps in a single iteration, because
    # it plans, records and verifies each example.
    torch.manual_seed(config.seed)
    model = build_model(len(tokenizer), hidden_size=config.hidden_size, layers=config.layers)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(config.steps):
        warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * warm_up * (1 - 0.9 * step / config.steps)
        ids, labels = next(source)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, loss.item())
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=directory.parent))
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=WarmStart.steps)
    parser.add_argument("--seed", type=int, default=WarmStart.seed)
    arguments = parser.parse_args()

    def progress(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"warm start: step {step} of {arguments.steps}, loss {loss:.3f}", flush=True)

    warm_start(arguments.directory, WarmStart(steps=arguments.steps, seed=arguments.seed), progress)


if __name__ == "__main__":
    main()
