"""Kinds of optimizers: each updates as the library does, wherever its state lies, and goes on from a checkpoint."""

import math
import re

import pytest
import torch

from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.weights.tensor_sets import read_manifest
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning import checkpoint, optimizer_rules
from tasks.learning.batching import collate
from tasks.learning.checkpoint import TrainerState
from tasks.learning.optimizer import PolicyOptimizer, host_zeros
from tasks.learning.restoring import optimizer_of

SHAPES = {"embed.weight": (70, 64), "up.weight": (80, 64), "narrow.weight": (96, 50), "norm.weight": (64,)}
OUTER = {"embed.weight"}
RATES = {"learning_rate": 0.01, "weight_decay": 0.1, "max_grad_norm": 1e9}
NAMES = ["adamw", "adamw_8bit", "muon"]


def configured(name):
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
    return OptimizerConfig(name=name, **RATES)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def train(optimizer, named, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1
        optimizer.step(1.0)
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def trained(name, steps=3, **arguments):
    named = parameters()
    optimizer = PolicyOptimizer(named, configured(name), outer=OUTER, **arguments)
    return train(optimizer, named, range(steps)), optimizer


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_adamw_has_the_bits_of_torchs_own_over_all_parameters():
    named = parameters()
    groups = [
        {"params": [p for p in named.values() if (p.dim() > 1) is wide], "weight_decay": decay}
        for wide, decay in ((True, 0.1), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, fused=True)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.1
        adamw.step()
    assert_equal(trained("adamw")[0], {name: parameter.detach() for name, parameter in named.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_state_on_the_host_gives_the_same_bits_and_survives_parking(name):
    expected, optimizer = trained(name)
    kept, offloaded = trained(name, offload="optimizer")
    assert_equal(kept, expected)
    assert_equal(dict(offloaded.each_moment()), dict(optimizer.each_moment()))
    before = [tensor.data_ptr() for tensor in offloaded.state_tensors()]
    offloaded.relocate(lambda tensor: tensor.clone())
    assert [tensor.data_ptr() for tensor in offloaded.state_tensors()] == before
    left = list(optimizer.state_tensors())
    optimizer.relocate(lambda tensor: tensor.clone())
    assert not {t.data_ptr() for t in left} & {t.data_ptr() for t in optimizer.state_tensors()}


@pytest.mark.slow
def test_moments_of_8_bits_are_those_of_torchao_where_rows_are_whole_blocks():
    pytest.importorskip("torchao")
    from torchao.optim import AdamW8bit  # noqa: PLC0415 - an extra

    found, optimizer = trained("adamw_8bit")
    kinds = {full_name: tensor.dtype for full_name, tensor in optimizer.each_moment()}
    assert {name for name, dtype in kinds.items() if dtype == torch.uint8} == {
        f"{moment}_codes.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in ("embed.weight", "up.weight")
    }
    assert {"exp_avg.narrow.weight", "exp_avg_sq.norm.weight"} <= kinds.keys()
    weight = parameters()["up.weight"]
    adamw = AdamW8bit([weight], lr=0.01, weight_decay=0.1, block_size=optimizer_rules.BLOCK)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for name, shape in SHAPES.items():
            gradient = torch.randn(shape, generator=generator) * 0.1
            if name == "up.weight":
                weight.grad = gradient
        with torch.compiler.set_stance("force_eager"):
            adamw.step()
    assert torch.equal(found["up.weight"], weight.detach())
    exact = trained("adamw")[0]
    moved = (exact["up.weight"] - parameters()["up.weight"]).abs().mean()
    assert 0 < (found["up.weight"] - exact["up.weight"]).abs().mean() < 0.05 * moved
    held = sum(tensor.nbytes for tensor in optimizer.state_tensors())
    quantised = sum(math.prod(SHAPES[name]) for name in ("embed.weight", "up.weight"))
    exactly = sum(math.prod(SHAPES[name]) for name in ("narrow.weight", "norm.weight"))
    assert held == quantised * 2 * (1 + 4 / optimizer_rules.BLOCK) + exactly * 8


def test_muon_updates_matrices_between_embedding_and_head_and_adamw_the_rest():
    found, optimizer = trained("muon")
    assert sorted(name for name, _ in optimizer.each_moment() if name.startswith("momentum_buffer")) == [
        "momentum_buffer.narrow.weight",
        "momentum_buffer.up.weight",
    ]
    exact = trained("adamw")[0]
    assert all(torch.equal(found[name], exact[name]) for name in ("embed.weight", "norm.weight"))
    # The size of AdamW's first step is the learning rate; Muon's is brought to a fifth of that and less for each value.
    first, whole = trained("muon", steps=1)[0]["up.weight"], parameters()["up.weight"].detach()
    update = first - whole * (1 - 0.01 * 0.1)
    assert 0.001 < float(update.square().mean().sqrt()) < 0.004
    # Its singular values are nearly the same, which is what Muon is for.
    values = torch.linalg.svdvals(update)
    assert float(values.max() / values.min()) < 3
    with pytest.raises(ValueError, match="outer: None"):
        PolicyOptimizer(parameters(), configured("muon"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_from_a_checkpoint_to_the_same_bits(name, build, ragged):
    config = configured(name)

    def new():
        policy = build()
        return policy, optimizer_of(policy, config, TrainerConfig(device="cpu"))

    def steps(policy, optimizer, numbers):
        for step in numbers:
            batch = collate(*ragged(4, seed=step))
            policy.logprobs(batch, 1.0)[0].sum().backward()
            optimizer.step(4.0)
        return policy.tensors()

    straight = steps(*new(), range(4))
    store, prefix = MemoryStore(), layout.checkpoint(2)
    policy, optimizer = new()
    steps(policy, optimizer, range(2))
    checkpoint.save(store, prefix, policy, optimizer, TrainerState.capture(2, optimizer))
    state = read_manifest(store, prefix).metadata["trainer_state"]
    assert state.get("optimizer") == (None if name == "adamw" else name)
    saved = checkpoint.read(store, prefix)
    assert saved.state.optimizer == name
    assert ("exp_avg_codes" in saved.moments) == (name == "adamw_8bit")
    policy, optimizer = new()
    checkpoint.restore(saved, policy, optimizer)
    assert_equal(steps(policy, optimizer, range(2, 4)), straight)
    other = PolicyOptimizer(policy.parameters(), OptimizerConfig(name="muon" if name == "adamw" else "adamw"), outer=())
    line = f"critic.optimizer.name: value {other.name!r}; allowed with this checkpoint: {name!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        checkpoint.restore(saved, policy, other, "critic.optimizer")


def test_muon_leaves_the_embedding_and_the_head_of_a_model(build):
    policy = build()
    optimizer = optimizer_of(policy, configured("muon"), TrainerConfig(device="cpu"))
    kinds = dict(part.partition(".")[::2][::-1] for part, _ in optimizer.each_moment())
    assert kinds["model.embed_tokens.weight"] == "exp_avg_sq"
    assert kinds["model.layers.0.mlp.up_proj.weight"] == "momentum_buffer"
    assert policy.outer_parameters() <= kinds.keys()


@pytest.mark.parametrize("slab_bytes", [1, 1 << 10, 1 << 20])
def test_tensors_on_the_host_share_pieces_and_no_bytes(slab_bytes):
    wanted = [((3, 5), torch.float32), ((7,), torch.uint8), ((0, 4), torch.float32), ((40, 10), torch.float32)]
    found = host_zeros(wanted, pinned=False, slab_bytes=slab_bytes)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in found] == wanted
    for number, tensor in enumerate(found):
        assert not tensor.any()
        tensor.fill_(number + 1)
    assert all(bool((tensor == number + 1).all()) for number, tensor in enumerate(found))
