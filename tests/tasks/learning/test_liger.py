"""Liger's kernels: which are asked for, what is put back, and that a model that computes else keeps its own."""

import importlib.util
import logging
from types import MethodType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning import liger
from tasks.learning.faster_passes import make_faster
from tasks.learning.learner import Learner
from tasks.learning.liger import LigerPatch, NoLigerKernelsError, liger_if_equal, options_of, patch_of
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import probe
from tasks.learning.trained_model import PolicyError

MODEL = SimpleNamespace(config=SimpleNamespace(model_type="abacus"))
IS_INSTALLED = importlib.util.find_spec("liger_kernel") is not None


class OtherNorm(torch.nn.Module):
    """What a patch puts in place of a class of norms."""


def patch_with(factor=1.0):
    """A patch function as Liger's for Qwen2, whose norms multiply by a factor besides."""

    def forward(norm, hidden):
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * (hidden * scale) * (1.0 + norm.offset) * factor

    def rotated(*_given, **_named):
        raise RuntimeError("a kernel of a GPU")

    def patch(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, model=None):
        assert rope
        assert rms_norm
        assert not cross_entropy
        assert not fused_linear_cross_entropy
        modeling_qwen2.apply_rotary_pos_emb = rotated
        modeling_qwen2.Qwen2RMSNorm = OtherNorm
        for layer in model.base_model.layers:
            layer.input_layernorm.offset = 0.0
            layer.input_layernorm.__dict__["forward"] = MethodType(forward, layer.input_layernorm)

    return patch


@pytest.fixture
def known(monkeypatch):
    """known(patch): let Liger know a patch function for every model, on every device."""
    return lambda patch: monkeypatch.setattr(liger, "patch_of", lambda _model, _device: patch)


def passes(policy):
    return lambda batch: policy.logprobs(batch, 1.0)[0]


def snapshot(module):
    return {name: dict(part.__dict__) for name, part in module.named_modules()}


def test_there_are_none_for_a_device_that_is_no_gpu():
    with pytest.raises(NoLigerKernelsError, match="need a GPU, and the model is on device 'cpu'"):
        patch_of(MODEL, torch.device("cpu"))


@pytest.mark.skipif(IS_INSTALLED, reason="liger-kernel is installed")
def test_there_are_none_without_the_package():
    with pytest.raises(NoLigerKernelsError, match="liger-kernel cannot be imported: No module"):
        patch_of(MODEL, torch.device("cuda"))


@pytest.mark.skipif(not IS_INSTALLED, reason="needs liger-kernel")
def test_there_are_none_for_a_model_that_liger_does_not_know():
    with pytest.raises(NoLigerKernelsError, match="model of type 'abacus'"):
        patch_of(MODEL, torch.device("cuda"))


def test_what_is_not_a_kernel_of_the_layers_is_switched_off():
    def patch(rope=True, fused_linear_cross_entropy=True, relu_squared=True, swiglu=True, row_mode=None, model=None):
        raise NotImplementedError

    assert options_of(patch) == {
        "rope": True,
        "swiglu": True,
        "fused_linear_cross_entropy": False,
        "relu_squared": False,
    }


def test_a_model_that_computes_the_same_is_patched_and_others_are_not(build, batch, known, caplog):
    policy, other = build(), build()
    expected, norm, rotary = passes(policy)(batch), modeling_qwen2.Qwen2RMSNorm, modeling_qwen2.apply_rotary_pos_emb
    before = snapshot(policy.module)
    try:
        known(patch_with())
        with caplog.at_level(logging.INFO, logger="gleaner"):
            assert liger_if_equal(policy.module, policy.device, passes(policy), probe(policy, (1, 3))) is None
        assert caplog.messages == ["passes of Qwen2ForCausalLM have Liger's kernels"]
        assert all("forward" in layer.input_layernorm.__dict__ for layer in policy.module.model.layers)
        # Classes stay those of transformers, and float32 on a CPU keeps its own rotary embedding.
        assert modeling_qwen2.Qwen2RMSNorm is norm
        torch.testing.assert_close(passes(policy)(batch), expected)
        assert torch.equal(passes(other)(batch), expected)
        assert snapshot(policy.module) != before
    finally:
        modeling_qwen2.apply_rotary_pos_emb = rotary


@pytest.mark.parametrize("fails", [False, True], ids=["other log-probs", "an error"])
def test_a_model_that_computes_something_else_keeps_its_own(build, batch, known, caplog, fails):
    policy = build()
    expected, before, defining = passes(policy)(batch), snapshot(policy.module), dict(vars(modeling_qwen2))

    def failing(model=None):
        patch_with()(cross_entropy=False, fused_linear_cross_entropy=False, model=model)
        raise RuntimeError("no such kernel")

    known(failing if fails else patch_with(3.0))
    with caplog.at_level(logging.INFO, logger="gleaner"):
        reason = liger_if_equal(policy.module, policy.device, passes(policy), probe(policy, (1, 3)))
    assert reason.startswith("RuntimeError: no such kernel" if fails else "its log-probs are ")
    assert caplog.messages == [f"passes of Qwen2ForCausalLM have no Liger kernels: {reason}"]
    assert snapshot(policy.module) == before
    assert vars(modeling_qwen2) == defining
    assert torch.equal(passes(policy)(batch), expected)


def test_half_precision_on_a_gpu_alone_is_rotated_by_liger():
    theirs, own = object(), object()
    rotated = liger._in_half_precision(lambda *_: own, lambda *_: theirs)
    for is_cuda, dtype, expected in (
        (True, torch.bfloat16, theirs),
        (True, torch.float16, theirs),
        (True, torch.float32, own),
        (False, torch.bfloat16, own),
    ):
        assert rotated(SimpleNamespace(is_cuda=is_cuda, dtype=dtype), None) is expected


def test_true_demands_them_and_the_default_does_without(build):
    policy = build()
    learner = Learner(policy, PolicyOptimizer(policy.parameters(), OptimizerConfig()), None)
    for setting in ("auto", False):
        make_faster(learner, TrainerConfig(device="cpu", dtype="bfloat16", use_liger_kernel=setting))
    with pytest.raises(PolicyError, match=r"^trainer.use_liger_kernel: value true; allowed here: 'auto' or false: "):
        make_faster(learner, TrainerConfig(device="cpu", use_liger_kernel=True))


@pytest.mark.skipif(not IS_INSTALLED, reason="needs liger-kernel")
def test_liger_s_own_patch_is_put_back(model):
    module = AutoModelForCausalLM.from_pretrained(model[0], state_dict=model[1])
    before, defining = snapshot(module), dict(vars(modeling_qwen2))
    patch = LigerPatch(module)
    patch.apply(patch_of(module, torch.device("cuda")))
    assert snapshot(module) != before
    patch.undo()
    assert snapshot(module) == before
    assert vars(modeling_qwen2) == defining
