"""The random model of benchmarks.gpu, which has a real model's shape, so that nothing is downloaded."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.sizes import ModelShape
from benchmarks.parity_work import randomise
from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.weight_tensors import as_block

CONTEXT_LENGTH_MAX = 4096


def model_config(shape: ModelShape) -> Any:
    """The Hugging Face configuration of a Qwen2 of this shape."""
    return AutoConfig.for_model(
        "qwen2",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=CONTEXT_LENGTH_MAX,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["Qwen2ForCausalLM"],
    )


def write_model(shape: ModelShape, folder: Path, device: str) -> dict[str, Tensor]:
    """Write config.json and model.safetensors in bfloat16; returns the tensors on the CPU, tied ones once."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config(shape), dtype=torch.bfloat16, trust_remote_code=False)
    model.to("cpu").save_pretrained(str(folder))
    if device == "cuda":
        torch.cuda.empty_cache()  # for other processes
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def peaked_model(shape: ModelShape, folder: Path, device: str) -> dict[str, TensorBlock]:
    """Write config.json; returns parameters with which the next token depends on the context, in bfloat16 on a GPU."""
    config = model_config(shape)
    config.save_pretrained(str(folder))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        randomise(model, shape.hidden)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return {name: as_block(parameter.detach().to("cpu", dtype)) for name, parameter in model.named_parameters()}
