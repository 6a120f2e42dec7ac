"""A policy with adapters against the policy it merges to, and against the pretrained one it came from."""

import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tasks.configuration.lora import LoraConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.adapted_policy import AdaptedPolicy, Pretrained
from tasks.learning.batching import collate
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy
from tasks.learning.ranks import Ranks
from tasks.learning.trained_model import PolicyError
from tests.tasks.learning.tiny_model import VOCABULARY, write_model

CPU = TrainerConfig(device="cpu")
LORA = LoraConfig(rank=3, alpha=6.0)


@pytest.fixture
def adapted(model):
    """adapted(lora, **TrainerConfig fields) -> a new AdaptedPolicy of the same pretrained weights."""

    def new(lora=LORA, seed=5, **fields):
        return AdaptedPolicy(*model, TrainerConfig(device="cpu", **fields), lora, seed=seed)

    return new


def stir(policy):
    """Adapters as after some training: both factors are something."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def test_it_begins_as_the_pretrained_model(adapted, model, batch):
    plain = Policy(*model, CPU)
    torch.testing.assert_close(adapted().logprobs(batch, 1.0)[0], plain.logprobs(batch, 1.0)[0], rtol=0, atol=1e-6)
    found = adapted().tensors()
    assert found.keys() == plain.tensors().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.tensors().items())
    assert adapted().shapes() == plain.shapes()


def half_precision(model):
    return {name: tensor.to(torch.bfloat16) for name, tensor in model[1].items()}


def test_weights_that_are_stored_in_the_compute_dtype_have_no_masters_and_lose_no_bit(model, batch):
    """The same values stored in float32 have masters, and everything that is computed or published is equal."""
    half = half_precision(model)
    found = []
    for tensors in (half, {name: tensor.float() for name, tensor in half.items()}):
        policy = stir(AdaptedPolicy(model[0], tensors, TrainerConfig(device="cpu", dtype="bfloat16"), LORA, seed=5))
        logprobs = policy.logprobs(batch, 1.0)[0]
        logprobs.sum().backward()
        gradients = {name: parameter.grad for name, parameter in policy.parameters().items()}
        held = sum(tensor.nbytes for tensor in policy.memory() if tensor.numel() > 16)
        policy.relocate(lambda tensor: tensor.clone())
        published = policy.tensors() | {f"half {name}": t for name, t in policy.tensors(torch.bfloat16).items()}
        found.append((published | gradients | {"": logprobs, "parked": policy.logprobs(batch, 1.0)[0]}, policy, held))
    (ours, policy, held), (theirs, _, before) = found
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    frozen = sum(t.numel() for name, t in policy.module.named_parameters() if ".lora_" not in name and t.numel() > 16)
    assert before - held == 4 * frozen
    assert {parameter.dtype for parameter in policy.parameters().values()} == {torch.float32}


def test_only_what_is_stored_in_another_dtype_has_masters(model, batch):
    tensors = half_precision(model)
    norm = "model.norm.weight"
    tensors[norm] = tensors[norm].float() + 2.0**-12
    policy = AdaptedPolicy(model[0], tensors, TrainerConfig(device="cpu", dtype="bfloat16"), LORA, seed=5)
    policy.logprobs(batch, 1.0)
    assert torch.equal(policy.tensors()[norm], tensors[norm])
    masters = {name for name, value in policy.state().items() if value.dtype == torch.float32}
    assert masters == {norm, *policy.parameters()}


def test_only_the_first_rank_copies_adapters_to_its_host(model):
    """The device is one from which nothing can be copied."""
    ranks = [Ranks(rank=rank) for rank in (0, 1)]
    first, second = (AdaptedPolicy(*model, CPU, LORA, seed=5, ranks=each) for each in ranks)
    for policy in (first, second):
        policy.module.to("meta")
    trained = dict(second.each_trained())
    assert trained.keys() == second.trained_shapes().keys()
    assert all(tensor.is_meta for tensor in trained.values())
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        next(first.each_trained())


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_published_is_what_it_computes(tmp_path, ragged, tied):
    batch = collate(*ragged())
    policy = stir(AdaptedPolicy(tmp_path, write_model(tmp_path, tied=tied), CPU, LORA, seed=1))
    merged = Policy(tmp_path, policy.tensors(), CPU)
    torch.testing.assert_close(merged.logprobs(batch, 1.0)[0], policy.logprobs(batch, 1.0)[0], rtol=0, atol=1e-5)
    before = Policy(tmp_path, write_model(tmp_path, tied=tied), CPU)
    assert (merged.logprobs(batch, 1.0)[0] - before.logprobs(batch, 1.0)[0]).abs().max() > 0.1


def test_layers_with_transposed_weights_are_merged_as_well(tmp_path):
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    tensors = GPT2LMHeadModel(config).state_dict()
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=("attn.c_proj", "c_fc"))
    policy = stir(AdaptedPolicy(tmp_path, tensors, CPU, lora, seed=1))
    batch = collate([0], [[1, 2, 3]], [[4, 5, 6, 7]], [[-1.0] * 4])
    merged = Policy(tmp_path, policy.tensors(), CPU)
    torch.testing.assert_close(merged.logprobs(batch, 1.0)[0], policy.logprobs(batch, 1.0)[0], rtol=0, atol=1e-5)
    assert not torch.equal(
        policy.tensors()["transformer.h.0.attn.c_proj.weight"], tensors["transformer.h.0.attn.c_proj.weight"]
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_adapters_are_trained(adapted, batch, checkpointing):
    policy = adapted(gradient_checkpointing=checkpointing)
    before = {name: parameter.clone() for name, parameter in policy.module.named_parameters()}
    optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=1e-2))
    for _ in range(2):
        policy.logprobs(batch, 1.0)[0].sum().backward()
        optimizer.step(1.0)
    changed = {name for name, value in policy.module.named_parameters() if not torch.equal(value, before[name])}
    assert changed == set(policy.parameters())
    assert all(".lora_" in name for name in changed)
    assert len(changed) == 2 * 2 * 7  # two factors in seven linear layers of two decoder layers
    assert policy.trained_shapes().keys() == changed


def test_without_its_adapters_it_is_its_own_reference(adapted, model, batch):
    policy = stir(adapted())
    with_them = policy.logprobs(batch, 1.0)[0]
    reference, entropy = Pretrained(policy).logprobs(batch, 1.0)
    expected, expected_entropy = Policy(*model, CPU).logprobs(batch, 1.0)
    torch.testing.assert_close(reference, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(entropy, expected_entropy, rtol=0, atol=1e-5)
    assert not reference.requires_grad
    again = policy.logprobs(batch, 1.0)[0]
    assert torch.equal(again, with_them)
    again.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters().values())


def test_adapters_alone_make_it_again(adapted, batch):
    policy, again = stir(adapted()), adapted(seed=9)
    saved = {name: tensor.clone() for name, tensor in policy.each_trained()}
    again.load_trained(saved)
    assert torch.equal(again.logprobs(batch, 1.0)[0], policy.logprobs(batch, 1.0)[0])
    name = next(iter(saved))
    with pytest.raises(PolicyError, match="missing 'model"):
        again.load_trained({key: value for key, value in saved.items() if key != name})
    with pytest.raises(PolicyError, match=r"not of this model 'model\.norm\.weight'"):
        again.load_trained(saved | {"model.norm.weight": torch.ones(32)})


def test_adapters_begin_by_the_seed_and_nothing_else(adapted):
    torch.manual_seed(1)
    one = dict(adapted().each_trained())
    torch.manual_seed(2)
    two, other = dict(adapted().each_trained()), dict(adapted(seed=6).each_trained())
    assert all(torch.equal(two[name], value) for name, value in one.items())
    first = [name for name in one if "lora_A" in name]
    assert all(one[name].std() > 0 and not torch.equal(one[name], other[name]) for name in first)
    assert len({tuple(one[name].flatten()[:4].tolist()) for name in first}) == len(first)
    assert not any(one[name].any() for name in one if "lora_B" in name)


def test_layers_can_be_chosen(adapted):
    policy = adapted(LoraConfig(rank=2, target_modules=("q_proj", "layers.1.mlp.up_proj")))
    layers = {name.partition(".lora_")[0] for name in policy.parameters()}
    assert layers == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (("nowhere",), r"lora\.target_modules: .*nowhere"),
        (("lm_head",), r"lora\.target_modules: lm_head is the head; allowed: linear layers before it"),
        (("embed_tokens",), r"lora\.target_modules: model\.embed_tokens is of type Embedding; allowed: linear layers"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused(adapted, modules, message):
    with pytest.raises(PolicyError, match=message):
        adapted(LoraConfig(rank=2, target_modules=modules))


def test_without_peft_it_says_what_is_missing(adapted, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PolicyError, match="lora: peft is not installed; allowed: null"):
        adapted()
