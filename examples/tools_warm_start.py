"""Make the policy of `make demo-tools`: a tiny Qwen2 that looks up hidden digits and often adds them up wrongly."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from examples.hidden_sums import BASE, KEYS, STEP_COUNTS, UNKNOWN_KEY, problem
from examples.warm_start import WarmStart, build_tokenizer, padded, train_policy

# With it, about half of the sampled answers are right, and most groups have mixed rewards.
SUM_NOISE = 0.25
ALPHABET = KEYS + "0123456789" + "=;#?!" + UNKNOWN_KEY
# A turn ends with <eos>, and "=" asks for the next one: fh=?f!<eos>3=03;?h!<eos>4=32;#2<eos>
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}={{ message.content }}"
    "{% for call in message.tool_calls or [] %}?{{ call.function.arguments.key }}!{% endfor %}{{ eos_token }}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
LOOK = {"type": "function", "function": {"name": "look", "arguments": {"key": "{content}"}}}
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "=",
    "fields": {
        "tool_calls": {"open": "?", "close": "!", "repeats": True, "content": "text", "transform": LOOK},
        "content": {"content": "text"},
    },
}


def chat_tokenizer() -> Any:
    """A tokenizer with one token per character, whose chat template and response template know the tool `look`."""
    tokenizer = build_tokenizer(ALPHABET)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def demonstration(rng: random.Random, keys: str, table: dict[str, str], noise: float) -> list[tuple[str, bool]]:
    """A worked conversation after the prompt: its pieces of text, and whether the policy writes them.

    After each answer the policy writes the old and the new sum; with probability `noise` the new one is random.
    """
    pieces, text, total = [], "", 0
    for key in keys:
        pieces += [(f"{text}?{key}!<eos>", True), (f"{table[key]}=", False)]
        old, total = total, (rng.randrange(BASE) if rng.random() < noise else (total + int(table[key])) % BASE)
        text = f"{old}{total};"
    return [*pieces, (f"{text}#{total}<eos>", True)]


def batches(tokenizer: Any, config: WarmStart) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches (ids [B, L], labels [B, L]) of demonstrations of similar length; loss on the policy's tokens."""
    rng = random.Random(config.seed)

    def row() -> tuple[list[int], list[bool]]:
        keys, table = problem(rng, rng.choice(STEP_COUNTS))
        ids: list[int] = []
        learned: list[bool] = []
        for text, own in [(f"<bos>{keys}=", False), *demonstration(rng, keys, table, SUM_NOISE)]:
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += piece
            learned += [own] * len(piece)
        return ids, learned

    while True:
        rows = sorted((row() for _ in range(config.batch * 8)), key=lambda one: len(one[0]))
        chunks = [rows[start : start + config.batch] for start in range(0, len(rows), config.batch)]
        rng.shuffle(chunks)
        yield from map(padded, chunks)


def warm_start(directory: Path, config: WarmStart, progress: Callable[[int, float], None]) -> None:
    """Train from random weights on noisy demonstrations and save model and tokenizer as one Hugging Face directory."""
    tokenizer = chat_tokenizer()
    train_policy(directory, tokenizer, batches(tokenizer, config), config, progress)
