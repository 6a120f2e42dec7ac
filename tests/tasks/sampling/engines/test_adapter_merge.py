"""Merging an adapter: a reader's tensors are the trainer's, bit for bit, whatever the layers, dtypes and threads."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from storage.weights.adapters import Adapter
from tasks.configuration.lora import LoraConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.adapted_policy import AdaptedPolicy
from tasks.sampling.engines.adapter_merge import merged_blocks, merged_weight
from tasks.sampling.engines.weight_tensors import as_block
from tests.tasks.learning.test_adapted_policy import stir
from tests.tasks.learning.tiny_model import write_model


def llama(folder):
    return write_model(folder, tied=True), ()


def gpt2(folder):
    config = GPT2Config(vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tensors = {name: value for name, value in GPT2LMHeadModel(config).state_dict().items() if name != "lm_head.weight"}
    return tensors, ("attn.c_proj", "c_fc")


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reader_merges_to_the_bits_that_the_trainer_publishes(tmp_path, make, dtype):
    tensors, targets = make(tmp_path)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    lora = LoraConfig(rank=3, alpha=5.0, target_modules=targets, publish="adapter")
    policy = stir(AdaptedPolicy(tmp_path, dict(tensors), TrainerConfig(device="cpu"), lora, seed=1))
    factors = {name: as_block(tensor) for name, tensor in policy.each_factor()}
    names = [name.removesuffix(".lora_A.weight") for name in factors if name.endswith("A.weight")]
    layers = {name: (factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]) for name in names}
    adapter = Adapter(record=policy.adapter, layers=layers)
    found = merged_blocks({name: as_block(tensor) for name, tensor in tensors.items()}, adapter)
    published = {name: as_block(tensor) for name, tensor in policy.tensors(dtype).items()}
    changed = [name for name, tensor in tensors.items() if bytes(as_block(tensor).data) != bytes(found[name].data)]
    assert sorted(changed) == sorted(f"{name}.weight" for name in names)
    for name, block in published.items():
        assert (found[name].dtype, found[name].shape) == (block.dtype, block.shape)
        assert bytes(found[name].data) == bytes(block.data), name


def test_the_number_of_threads_changes_no_bit():
    torch.manual_seed(0)
    weight, first, second = torch.randn(384, 512), torch.randn(16, 512), torch.randn(384, 16)
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            found.append(merged_weight(weight, first, second, 0.7, transposed=False))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], each) for each in found[1:])
    exact = (weight.double() + 0.7 * (second.double() @ first.double())).float()
    torch.testing.assert_close(found[0], exact, rtol=1e-5, atol=1e-5)
