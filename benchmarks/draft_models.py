"""Draft models: one of half the width and depth of the demo's policy, distilled from it, and models near random ones.

A part of benchmarks.speculation.
"""

from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2ForCausalLM

from examples.warm_start import WarmStart, batches, build_model, build_tokenizer
from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.decoder import read_config
from tasks.sampling.engines.model_drafter import ModelDrafter
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.weight_tensors import as_block, tensors_of_folder

HALF = {"hidden_size": WarmStart.hidden_size // 2, "layers": WarmStart.layers // 2}
LEARNING_RATE, NOISE = 3e-3, 0.02


def distil(policy: Path, folder: Path, steps: int) -> None:
    """Save a model of half the size with nearly the distributions of the demo's policy, on texts of its warm start."""
    tokenizer = build_tokenizer()
    teacher = Qwen2ForCausalLM.from_pretrained(str(policy), local_files_only=True, trust_remote_code=False).eval()
    torch.manual_seed(0)
    model = build_model(len(tokenizer), **HALF)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for ids, labels in islice(batches(tokenizer, WarmStart()), steps):
        answered = labels[:, 1:] >= 0
        with torch.no_grad():
            wanted = teacher(input_ids=ids).logits[:, :-1][answered].log_softmax(-1)
        found = model(input_ids=ids).logits[:, :-1][answered].log_softmax(-1)
        optimizer.zero_grad()
        functional.kl_div(found, wanted, log_target=True, reduction="batchmean").backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.save_pretrained(folder)


def distilled_drafter(folder: Path, rows: int, context_length: int, *, keyed: bool = True) -> ModelDrafter:
    """A drafter of the model in a folder. keyed: False takes its most likely tokens."""
    engine = TorchEngine(folder, device="cpu", max_responses_in_flight=rows, context_length=context_length)
    vocab_size = read_config(folder, context_length).get_text_config().vocab_size
    return ModelDrafter(engine, weights=partial(tensors_of_folder, folder), vocab_size=vocab_size, keyed=keyed)


def near_drafter(
    folder: Path, weights: Mapping[str, Tensor], vocab_size: int, rows: int, context_length: int
) -> ModelDrafter:
    """A drafter whose weights differ a little from those of a policy with its config.json in a folder."""

    def near() -> dict[str, TensorBlock]:
        generator = torch.Generator().manual_seed(3)
        return {
            name: as_block(tensor.data + NOISE * torch.randn(tensor.shape, generator=generator))
            for name, tensor in weights.items()
        }

    engine = TorchEngine(folder, device="cpu", max_responses_in_flight=rows, context_length=context_length)
    return ModelDrafter(engine, weights=near, vocab_size=vocab_size)
