"""Tokens with torch, here, and without it, in a process of its own: what one has loaded is a fact of the process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.warm_start import build_model, build_tokenizer
from tests.tiny_model import tiny_config, tiny_tokenizer
from tests.tokenizer_work import made_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE, as Qwen's and Llama's."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    core.train_from_iterator(["What is 6 x 7? It is 42.", "be brief", "What is 12 + 34?"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=600, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("kind", ["one per character", "with <bos>", "byte-level BPE"])
def test_a_process_without_models_makes_the_same_tokens_and_has_no_torch(kind, tmp_path):
    tokenizer, config = {
        "one per character": lambda: (tiny_tokenizer(), tiny_config()),
        "with <bos>": lambda: (build_tokenizer(), build_model(64).config),
        "byte-level BPE": lambda: (byte_level(), tiny_config("qwen3")),
    }[kind]()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    done = run("-m", "tests.tokenizer_work", str(tmp_path))
    made, has_torch = json.loads(done.stdout)
    assert not has_torch
    assert made == made_of(tmp_path)
    assert made[2][0]
    assert made[3]
    assert "PyTorch" not in done.stderr


def test_torch_can_still_be_had_by_others():
    code = (
        "from tasks.prompts import auto_tokenizer; auto_tokenizer.forgo_models(); auto_tokenizer.auto_tokenizer();"
        "import torch; print(torch.ones(2).sum().item())"
    )
    assert run("-c", code).stdout == "2.0\n"


def test_where_torch_is_loaded_there_is_nothing_to_forgo():
    code = (
        "import torch; from tasks.prompts import auto_tokenizer; auto_tokenizer.forgo_models();"
        "auto_tokenizer.auto_tokenizer(); import transformers; print(transformers.is_torch_available())"
    )
    assert run("-c", code).stdout == "True\n"
