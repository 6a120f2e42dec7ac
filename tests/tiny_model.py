"""Tiny random language models and a character tokenizer, made in memory: nothing is downloaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.weight_tensors import as_block

VOCAB_SIZE = 96
STOP_TOKEN = 2
CHARACTERS = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz:;?!<>|#\n"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; ids 0..3 are <pad>, <bos>, <eos>, <unk>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - only where it is used

    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS]
    tokens += [f"<unused{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def tiny_config(model_type: str = "qwen2", **changes: Any) -> Any:
    """A configuration of any decoder-only family that uses the common field names."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": STOP_TOKEN,
        "pad_token_id": 0,
    }
    if model_type == "qwen3":
        fields["head_dim"] = 24
    return AutoConfig.for_model(model_type, **(fields | changes))


def tiny_model(config: Any, seed: int = 0) -> Any:
    """The model with weights large enough that its distributions are neither flat nor certain."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.25 if "embed" in name else 0.1)
                elif "bias" in name:
                    parameter.normal_(0.0, 0.1)
                else:
                    parameter.uniform_(0.8, 1.2)
    return model


def save_tiny_model(model_dir: Path, model: Any) -> Path:
    """config.json, weights and tokenizer, as a user's model directory has them."""
    model.save_pretrained(model_dir)
    tiny_tokenizer().save_pretrained(model_dir)
    return model_dir


def weight_blocks(model: Any) -> dict[str, TensorBlock]:
    """The model's parameters by name, tied ones once."""
    return {name: as_block(parameter) for name, parameter in model.named_parameters()}


def plain_logprobs(
    model: Any, item: GenerationRequest, token_ids: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Of the response's tokens, by one forward pass of the Hugging Face model, without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*item.prompt_ids, *token_ids]])).logits[0]
    logprobs = torch.log_softmax(logits[len(item.prompt_ids) - 1 : -1].float() / temperature, -1)
    found: list[float] = logprobs[torch.arange(len(token_ids)), torch.tensor(token_ids)].tolist()
    return found
