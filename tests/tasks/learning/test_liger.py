import importlib.util
from types import SimpleNamespace

import pytest
import torch

from tasks.learning.liger import apply_liger_kernels, options_of

MODEL = SimpleNamespace(config=SimpleNamespace(model_type="abacus"))


def test_refuses_a_device_that_is_no_gpu():
    with pytest.raises(ValueError, match="use_liger_kernel: value true; allowed on device 'cpu': false"):
        apply_liger_kernels(MODEL, torch.device("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_refuses_when_the_package_is_missing():
    with pytest.raises(ValueError, match="allowed without the package liger-kernel: false"):
        apply_liger_kernels(MODEL, torch.device("cuda"))


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
def test_refuses_a_model_without_kernels():
    with pytest.raises(ValueError, match="model of type 'abacus'"):
        apply_liger_kernels(MODEL, torch.device("cuda"))


def test_the_head_and_the_loss_are_never_patched():
    def patch(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model=None):
        raise NotImplementedError

    assert options_of(patch) == {
        "rope": True,
        "rms_norm": True,
        "swiglu": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
