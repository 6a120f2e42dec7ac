"""A random two-layer Qwen2, small enough for every test to build its own."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 48


def write_model(directory, *, tied=True, seed=0):
    """A random tiny Qwen2: its directory and its tensors under Hugging Face names."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    config.save_pretrained(directory)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
