"""Compiled layers compute what others do, at any size, and layers that do not are left as they are."""

import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import collate
from tasks.learning.compiled_layers import compile_if_equal
from tasks.learning.faster_passes import make_faster
from tasks.learning.learner import Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.packing import pack
from tasks.learning.policy import probe

# Of torch.compile itself.
_WARNINGS = ("ignore:The .grad attribute of a Tensor", "ignore:`torch.jit.script_method` is deprecated")
pytestmark = [pytest.mark.slow, *map(pytest.mark.filterwarnings, _WARNINGS)]


@pytest.fixture(autouse=True)
def _forgets_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def passes(policy):
    return lambda batch: policy.logprobs(batch, 1.0)[0]


def gradient_of(policy, batch):
    passes(policy)(batch).square().sum().backward()
    found = {name: parameter.grad for name, parameter in policy.parameters().items()}
    policy.drop_gradient()
    return found


@pytest.mark.parametrize(("packed", "checkpointing"), [(False, False), (True, True)])
def test_layers_are_compiled_once_for_all_layers_and_sizes(build, ragged, packed, checkpointing):
    plain, compiled = (build(gradient_checkpointing=checkpointing) for _ in range(2))
    for policy in (plain, compiled) if packed else ():
        pack(policy.module)
    counter = CompileCounterWithBackend("eager")
    assert compile_if_equal(compiled.module, passes(compiled), probe(compiled, (1, 3, 2)), backend=counter)
    gradient_of(compiled, collate(*ragged(3)))
    first = counter.frame_count
    assert first >= 1
    for count in (2, 7):
        batch = collate(*ragged(count, seed=count))
        torch.testing.assert_close(passes(compiled)(batch), passes(plain)(batch), rtol=1e-5, atol=1e-5)
        ours, theirs = gradient_of(compiled, batch), gradient_of(plain, batch)
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= first + 2


def test_layers_that_cannot_be_compiled_are_left_as_they_are(build, batch, caplog):
    policy = build()
    expected = passes(policy)(batch)

    def backend(_graph, _inputs):
        raise RuntimeError("no compiler here")

    with caplog.at_level(logging.INFO, logger="gleaner"):
        assert not compile_if_equal(policy.module, passes(policy), probe(policy, (1, 2)), backend=backend)
    (line,) = [each for each in caplog.messages if each.startswith("layers of ")]
    assert line.startswith("layers of Qwen2ForCausalLM are not compiled: BackendCompilerFailed: ")
    assert "no compiler here" in line
    assert torch.equal(passes(policy)(batch), expected)


def test_the_configuration_asks_for_it(build, batch):
    policy = build()
    expected = passes(policy)(batch)
    learner = Learner(policy, PolicyOptimizer(policy.parameters(), OptimizerConfig()), None)
    make_faster(learner, TrainerConfig(device="cpu"))
    layers = policy.module.model.layers
    assert all(layer._compiled_call_impl is None for layer in layers)
    # The compiler for CPUs takes minutes.
    with torch.compiler.set_stance("force_eager"):
        make_faster(learner, TrainerConfig(device="cpu", compile_layers=True))
    assert all(layer._compiled_call_impl is not None for layer in layers)
    with torch.compiler.set_stance("force_eager"):
        found = passes(policy)(batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
