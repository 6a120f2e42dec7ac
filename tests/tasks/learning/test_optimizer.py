import math

import pytest
import torch

from tasks.configuration.optimizer import OptimizerConfig
from tasks.learning.optimizer import NonFiniteGradient, PolicyOptimizer, learning_rate


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = {"layer.weight": (3, 4), "layer.bias": (3,), "norm.weight": (4,)}
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for n, s in shapes.items()}


def set_gradients(named, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def test_steps_equal_adamw_written_out():
    config = OptimizerConfig(
        learning_rate=0.1, weight_decay=0.1, max_grad_norm=0.5, betas=(0.9, 0.99), eps=1e-6, warmup_steps=2
    )
    named = parameters()
    expected = {name: p.detach().clone() for name, p in named.items()}
    first = {name: torch.zeros_like(p) for name, p in expected.items()}
    second = {name: torch.zeros_like(p) for name, p in expected.items()}
    optimizer = PolicyOptimizer(named, config)
    for step in range(4):
        set_gradients(named, step)
        gradients = {name: p.grad / 7 for name, p in named.items()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        rate = 0.05 if step == 0 else 0.1
        outcome = optimizer.step(7.0)
        assert outcome.grad_norm == pytest.approx(norm, abs=1e-12)
        assert outcome.learning_rate == rate
        for name, parameter in named.items():
            gradient = gradients[name] * min(1.0, 0.5 / (norm + 1e-6))
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.99 * second[name] + 0.01 * gradient**2
            unbiased = second[name] / (1 - 0.99 ** (step + 1))
            decayed = expected[name] * (1 - rate * 0.1 if name == "layer.weight" else 1)
            expected[name] = decayed - rate * first[name] / (1 - 0.9 ** (step + 1)) / (unbiased.sqrt() + 1e-6)
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-10)
    assert optimizer.steps == 4
    assert all(p.grad is None for p in named.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_touches_nothing(bad):
    named = parameters()
    optimizer = PolicyOptimizer(named, OptimizerConfig(learning_rate=0.1))
    before = {name: p.detach().clone() for name, p in named.items()}
    set_gradients(named, 0)
    named["layer.bias"].grad[1] = bad
    with pytest.raises(NonFiniteGradient, match=r"non-finite gradient; responses 0, 1, .* and 4 more") as raised:
        optimizer.step(1.0, range(20))
    assert raised.value.responses == tuple(range(20))
    assert all(torch.equal(p.detach(), before[name]) for name, p in named.items())
    assert all(float(m.abs().sum()) == 0 for _, m in optimizer.each_moment())
    assert optimizer.steps == 0
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        optimizer.step(1.0)


@pytest.mark.parametrize(
    ("config", "rates"),
    [
        (OptimizerConfig(learning_rate=2.0), [2, 2, 2]),
        (OptimizerConfig(learning_rate=2.0, warmup_steps=4), [0.5, 1, 1.5, 2, 2]),
        (OptimizerConfig(learning_rate=2.0, schedule="linear", total_steps=4), [2, 1.5, 1, 0.5, 0, 0]),
        (OptimizerConfig(learning_rate=2.0, schedule="linear", total_steps=3, warmup_steps=1), [2, 2, 1, 0, 0]),
        (
            OptimizerConfig(learning_rate=2.0, schedule="cosine", total_steps=4),
            [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0, 0],
        ),
    ],
)
def test_learning_rates_by_hand(config, rates):
    assert [learning_rate(step, config) for step in range(len(rates))] == pytest.approx(rates, abs=1e-15)


def test_restore_refuses_the_moments_of_another_model():
    optimizer = PolicyOptimizer(parameters(), OptimizerConfig())
    own = {kind: {} for kind in ("exp_avg", "exp_avg_sq")}
    for full_name, tensor in optimizer.each_moment():
        kind, _, name = full_name.partition(".")
        own[kind][name] = tensor
    with pytest.raises(ValueError, match=r"exp_avg: names differ .*norm\.weight"):
        optimizer.restore(1, own | {"exp_avg": {k: v for k, v in own["exp_avg"].items() if k != "norm.weight"}})
    with pytest.raises(ValueError, match=r"exp_avg_sq 'layer\.bias': shape \(9,\); allowed: \(3,\)"):
        optimizer.restore(1, own | {"exp_avg_sq": own["exp_avg_sq"] | {"layer.bias": torch.zeros(9)}})
    with pytest.raises(ValueError, match=r"momentum_buffer: names differ .*layer\.weight"):
        optimizer.restore(1, own | {"momentum_buffer": {"layer.weight": torch.zeros(3, 4)}})
    assert optimizer.steps == 0
