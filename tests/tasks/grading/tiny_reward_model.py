"""A tiny random reward model with its tokenizer, made in memory, and what it says by one plain forward pass."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from tasks.grading.reward import GradingCase
from tests.tiny_model import tiny_config, tiny_tokenizer

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"


def save_reward_model(folder: Path, model_type: str = "qwen2", *, template: str | None = None, **changes: Any) -> Path:
    """A random model of 50 thousand parameters whose scores are of the order of 1."""
    logging.disable_progress_bar()
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_labels": 1} | changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(tiny_config(model_type, **fields), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.3)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def plain_score(folder: Path, text: str, label: int = 0) -> float:
    """The logit of a text that stands alone."""
    model = AutoModelForSequenceClassification.from_pretrained(str(folder), dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(str(folder))(text)["input_ids"]
    with torch.no_grad():
        score: float = model(torch.tensor([ids])).logits[0, label].item()
    return score


def case(response: int, completion: str, prompt: Any = "1+1=") -> GradingCase:
    return GradingCase(response, prompt, completion, tuple(range(len(completion))), {})
