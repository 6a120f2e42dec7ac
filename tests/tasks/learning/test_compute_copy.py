"""Half-precision copies of parameters: what passes see, and what their float32 masters get."""

import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import XGLMConfig, XGLMForCausalLM

from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.compute_copy import ComputeCopy
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy, PolicyError
from tests.tasks.learning.tiny_model import write_model

HALF = torch.bfloat16


class Twice(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.last(self.second(self.first(inputs)).float())


def copied(seed=0):
    torch.manual_seed(seed)
    module = Twice()
    masters = dict(module.named_parameters())
    return module, masters, ComputeCopy(module, HALF, [module.last])


def test_a_pass_computes_with_the_masters_of_its_time():
    module, masters, _ = copied()
    with torch.no_grad():
        masters["first.weight"].fill_(2.0)
        module(torch.ones(1, 4, dtype=HALF))
    assert module.first.weight is module.second.weight
    assert torch.equal(module.first.weight, torch.full((4, 4), 2.0, dtype=HALF))


def test_modules_that_are_not_copied_keep_their_parameters():
    module, masters, copy = copied()
    assert module.last.weight is masters["last.weight"]
    assert copy.master(module.last.weight) is masters["last.weight"]
    assert copy.master(module.first.weight) is masters["first.weight"]
    assert [name for name, _ in module.named_parameters()] == list(masters)


def test_gradients_of_passes_are_added_in_float32():
    module, masters, _ = copied()
    inputs = torch.randn(40, 3, 4, generator=torch.Generator().manual_seed(1)).to(HALF)
    expected = torch.zeros(4, 4)
    for one in inputs:
        module(one).sum().backward()
        assert module.first.weight.grad is None
        alone, its_masters, _ = copied()
        alone(one).sum().backward()
        gradient = its_masters["first.weight"].grad
        assert torch.equal(gradient, gradient.to(HALF))
        expected += gradient
    assert torch.equal(masters["first.weight"].grad, expected)
    # In half precision, the sum would be another one.
    assert not torch.equal(expected, expected.to(HALF))


def test_a_dropped_model_frees_its_copies_and_masters():
    module, masters, copy = copied()
    module(torch.ones(1, 4, dtype=HALF)).sum().backward()
    left = [weakref.ref(parameter) for parameter in (module.first.weight, masters["first.weight"])]
    del module, masters, copy
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_an_update_too_small_for_half_precision_is_kept(build, batch):
    policy = build(dtype="bfloat16")
    optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=1e-7, weight_decay=0.0))
    before = policy.tensors()
    before = {name: tensor.clone() for name, tensor in before.items()}
    for _ in range(3):
        policy.logprobs(batch, 1.0)[0].sum().backward()
        optimizer.step(1.0)
    moved = policy.tensors()["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    assert 1e-7 < moved.abs().max() < 4e-7


def test_activations_between_layers_are_in_the_compute_dtype(build, batch):
    for dtype, expected in (("bfloat16", HALF), ("float32", torch.float32)):
        policy = build(dtype=dtype)
        seen = set()
        for layer in policy.module.model.layers:
            layer.register_forward_hook(lambda _layer, _inputs, output, seen=seen: seen.add(output.dtype))
        logprobs, entropy = policy.logprobs(batch, 1.0)
        assert seen == {expected}
        assert {logprobs.dtype, entropy.dtype} == {torch.float32}


def test_recomputed_activations_give_the_same_gradient(build, batch):
    found = []
    for checkpointing in (False, True):
        policy = build(dtype="bfloat16", gradient_checkpointing=checkpointing)
        policy.logprobs(batch, 1.0)[0].sum().backward()
        found.append({name: parameter.grad for name, parameter in policy.parameters().items()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0.02, atol=0.02)


def test_a_model_that_is_only_evaluated_has_no_masters(build, batch):
    reference, trained = build(dtype="bfloat16", trainable=False), build(dtype="bfloat16")
    parameters = sum(parameter.numel() for parameter in trained.parameters().values())
    held = [sum(t.nbytes for t in model.memory() if t.numel() > 16) for model in (reference, trained)]
    assert (2 * parameters, 6 * parameters) == pytest.approx(tuple(held), rel=0.05)
    assert torch.equal(reference.logprobs(batch, 1.0)[0], trained.logprobs(batch, 1.0)[0])


def test_a_parked_model_holds_its_masters_only(build, batch):
    whole, half = build(), build(dtype="bfloat16")
    expected = half.logprobs(batch, 1.0)[0]
    moved = []
    half.relocate(lambda tensor: moved.append(tensor) or tensor.clone())
    held = [sum(tensor.nbytes for tensor in model.memory()) for model in (whole, half)]
    assert held[0] == held[1] == sum(tensor.nbytes for tensor in moved)
    assert half.shapes() == whole.shapes()
    assert all(torch.equal(tensor, whole.tensors()[name]) for name, tensor in half.tensors().items())
    assert torch.equal(half.logprobs(batch, 1.0)[0], expected)


def test_masters_move_with_the_model_and_loaded_values_reach_them(tmp_path, build, batch):
    policy = build(dtype="bfloat16")
    left = [tensor.detach() for tensor in policy.memory()]
    expected = policy.logprobs(batch, 1.0)[0]
    policy.relocate(lambda tensor: tensor.clone())
    assert not {tensor.data_ptr() for tensor in left} & {tensor.data_ptr() for tensor in policy.memory()}
    assert torch.equal(policy.logprobs(batch, 1.0)[0], expected)
    (tmp_path / "other").mkdir()
    other = write_model(tmp_path / "other", seed=5)
    policy.load_tensors(other)
    assert all(
        torch.equal(policy.tensors()[name], tensor) for name, tensor in other.items() if name != "lm_head.weight"
    )
    assert not torch.equal(policy.logprobs(batch, 1.0)[0], expected)
    policy.logprobs(batch, 1.0)[0].sum().backward()
    policy.drop_gradient()
    assert all(parameter.grad is None for parameter in policy.parameters().values())


def test_a_model_that_cannot_compute_in_half_precision_is_refused_in_a_line(tmp_path):
    # Its positions are a float32 buffer, which it adds to its activations.
    config = XGLMConfig(
        vocab_size=48, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, max_position_embeddings=64
    )
    config.save_pretrained(tmp_path)
    tensors = dict(XGLMForCausalLM(config).state_dict())
    Policy(tmp_path, tensors, TrainerConfig(device="cpu"))
    expected = r"^trainer\.dtype: value 'bfloat16'; allowed with XGLMForCausalLM: 'float32', because a pass fails: .+$"
    with pytest.raises(PolicyError, match=expected):
        Policy(tmp_path, tensors, TrainerConfig(device="cpu", dtype="bfloat16"))
