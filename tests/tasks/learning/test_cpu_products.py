import subprocess
import sys

import pytest
import torch
from torch import nn

from tasks.learning.cpu_products import (
    FLOPS_MIN,
    CpuLinear,
    suits_onednn,
    times_transposed,
    use_cpu_products,
)
from tasks.sampling.engines.kernels import PRODUCTS_KEPT
from tests.covering import covering


def matrices(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [3, 4096])
def test_products_are_those_of_float64(rows, transposed):
    left, right = matrices((rows, 96), (160, 96))
    assert (2 * left.numel() * len(right) >= FLOPS_MIN) is (rows > 3)
    if transposed:
        left, right = left.T.contiguous().T, right.T.contiguous().T
    expected = left.double() @ right.double().T
    assert float((times_transposed(left, right).double() - expected).norm() / expected.norm()) < 1e-6
    assert torch.equal(times_transposed(left.double(), right.double()), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(96, 160), (160, 96), (4, 5)])
def test_a_linear_layer_computes_and_differentiates_as_in_float64(bias, sizes):
    torch.manual_seed(1)
    layer = nn.Linear(*sizes, bias=bias)
    exact = nn.Linear(*sizes, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    use_cpu_products(layer)
    assert type(layer) is CpuLinear
    assert type(exact) is nn.Linear
    inputs, upstream = matrices((8, 40, sizes[0]), (8, 40, sizes[1]))
    given = [inputs.requires_grad_(), inputs.detach().double().requires_grad_()]
    for each, value in zip((layer, exact), given, strict=True):
        (each(value) * upstream).sum().backward()
    pairs = [(layer(inputs).detach(), exact(given[1]).detach()), (given[0].grad, given[1].grad)]
    pairs += zip([p.grad for p in layer.parameters()], [p.grad for p in exact.parameters()], strict=True)
    for ours, theirs in pairs:
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 1e-6


def test_two_products_are_bit_equal():
    left, right = matrices((4096, 96), (160, 96))
    assert torch.equal(times_transposed(left, right), times_transposed(left, right))


def test_other_dtypes_devices_and_layers_are_torchs():
    assert not suits_onednn(torch.empty(1, dtype=torch.float64))
    assert not suits_onednn(torch.empty(1, device="meta"))

    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Special(2, 2), nn.Linear(2, 2, device="meta"))
    names = list(model.state_dict())
    use_cpu_products(model)
    assert [type(layer) for layer in model] == [CpuLinear, Special, nn.Linear]
    assert list(model.state_dict()) == names


def test_frozen_weights_get_no_gradient():
    layer = nn.Linear(96, 160)
    use_cpu_products(layer)
    (inputs,) = matrices((4096, 96))
    layer.requires_grad_(False)
    layer(inputs.requires_grad_()).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(inputs.grad, layer.weight.sum(dim=0).expand_as(inputs), rtol=1e-5, atol=1e-5)


IN_TRAINING = "from tasks.learning.cpu_products import suits_onednn; suits_onednn(torch.zeros(1))"
IN_ENGINES = (
    "from tasks.sampling.engines.torch_engine import TorchEngine; "
    "TorchEngine(sys.argv[1], device='cpu', max_responses_in_flight=1, context_length=8)"
)


@pytest.mark.parametrize(("first", "given"), covering([IN_TRAINING, IN_ENGINES], [None, "7"], strength=1))
@pytest.mark.slow
def test_code_compiled_for_shapes_is_kept_in_bounds_unless_somebody_sets_another(given, first, model, monkeypatch):
    """Whichever of both comes first in a process."""
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    script = f"import os, sys, torch; {first}; print(os.environ[{name!r}])"
    shown = subprocess.run([sys.executable, "-c", script, str(model[0])], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == (given or str(PRODUCTS_KEPT))
