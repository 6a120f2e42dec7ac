import pytest
import torch

from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.stores.metered import MeteredStore
from storage.stores.store import CorruptObject, ObjectMissing
from storage.weights import tensor_sets
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning import checkpoint
from tasks.learning.batching import collate
from tasks.learning.checkpoint import TrainerState
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy
from tasks.learning.step import accumulate, apply
from tests.tasks.learning.tiny_model import write_model

CONFIG = OptimizerConfig(learning_rate=1e-2, weight_decay=0.01, warmup_steps=3, schedule="cosine", total_steps=9)
PREFIX = layout.checkpoint(2)


def new_trainer(build):
    policy = build()
    return policy, PolicyOptimizer(policy.parameters(), CONFIG)


def train(policy, optimizer, ragged, steps):
    """Steps on batches that depend on the step and on torch's generator, as a trainer with dropout would."""
    metrics = []
    for step in steps:
        batch = collate(*ragged(4, seed=step))
        totals = accumulate(policy, batch, torch.randn(4), AlgorithmConfig(), temperature=1.0, max_completion_length=12)
        metrics.append(apply(optimizer, totals, AlgorithmConfig()))
    return metrics


def everything(policy, optimizer):
    held = {f"parameter.{name}": value for name, value in policy.tensors().items()} | dict(optimizer.each_moment())
    return {name: value.clone() for name, value in held.items()}


@pytest.mark.slow
@pytest.mark.parametrize("saved_after", [0, 2])
def test_resumed_training_is_bit_equal_to_uninterrupted(build, ragged, saved_after):
    policy, optimizer = new_trainer(build)
    torch.manual_seed(5)
    straight = train(policy, optimizer, ragged, range(5))
    expected = everything(policy, optimizer)

    store = MemoryStore()
    policy, optimizer = new_trainer(build)
    torch.manual_seed(5)
    before = train(policy, optimizer, ragged, range(saved_after))
    state = TrainerState.capture(saved_after, optimizer)
    checkpoint.save(store, PREFIX, policy, optimizer, state)

    policy, optimizer = new_trainer(build)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.zero_()
    torch.manual_seed(99)
    assert checkpoint.restore(checkpoint.read(store, PREFIX), policy, optimizer) == state
    assert optimizer.steps == saved_after
    after = train(policy, optimizer, ragged, range(saved_after, 5))
    assert before + after == straight
    resumed = everything(policy, optimizer)
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.items())


@pytest.mark.slow
def test_a_state_that_is_read_straight_into_a_learner_is_the_one_that_was_stored_and_is_read_once(build, model, ragged):
    policy, optimizer = new_trainer(build)
    train(policy, optimizer, ragged, range(2))
    store = MeteredStore(MemoryStore())
    state = TrainerState.capture(2, optimizer)
    # Many small objects, so that their order matters.
    manifest = checkpoint.save(store, PREFIX, policy, optimizer, state, object_bytes_max=5_000)
    assert len(manifest.objects) > 10
    before = store.requests.bytes_read
    saved = checkpoint.opened(store, PREFIX)
    again = Policy(model[0], saved.parameters, TrainerConfig(device="cpu"))
    moments = PolicyOptimizer(again.parameters(), CONFIG)
    moments.restore(saved.state.optimizer_steps, saved.moments)
    expected, found = everything(policy, optimizer), everything(again, moments)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    read = store.requests.bytes_read - before - len(store.get(layout.manifest(PREFIX)))
    assert read == sum(entry.bytes for entry in manifest.objects.values())


def test_the_parameters_arrive_before_the_rest_which_does_not_wait_in_memory_for_them(build, model):
    policy, optimizer = new_trainer(build)
    store = MemoryStore()
    manifest = checkpoint.save(
        store, PREFIX, policy, optimizer, TrainerState.capture(1, optimizer), object_bytes_max=5_000
    )
    for names in tensor_sets.names_by_object(manifest):
        if not any(name.startswith("parameter.") for name in names):
            store.delete(layout.tensor_object(PREFIX, manifest.tensors[names[0]].object))
    found = checkpoint.opened(store, PREFIX)
    again = Policy(model[0], found.parameters, TrainerConfig(device="cpu"))
    assert all(torch.equal(value, again.tensors()[name]) for name, value in policy.tensors().items())
    with pytest.raises(ObjectMissing):
        PolicyOptimizer(again.parameters(), CONFIG).restore(1, found.moments)


def test_a_policy_can_be_built_from_a_checkpoint(build, model, ragged):
    policy, optimizer = new_trainer(build)
    train(policy, optimizer, ragged, range(1))
    store = MemoryStore()
    checkpoint.save(store, PREFIX, policy, optimizer, TrainerState.capture(1, optimizer))
    again = Policy(model[0], checkpoint.read(store, PREFIX).parameters, TrainerConfig(device="cpu"))
    assert all(torch.equal(value, again.tensors()[name]) for name, value in policy.tensors().items())


def test_a_damaged_or_missing_checkpoint_is_never_used(build):
    policy, optimizer = new_trainer(build)
    store = MemoryStore()
    with pytest.raises(ObjectMissing):
        checkpoint.read(store, PREFIX)
    checkpoint.save(store, PREFIX, policy, optimizer, TrainerState.capture(0, optimizer))
    key = next(key for key in store.list(PREFIX) if key != layout.manifest(PREFIX))
    body = bytearray(store.get(key))
    body[-1] ^= 1
    store.put(key, bytes(body))
    with pytest.raises(CorruptObject, match="safetensors"):
        checkpoint.read(store, PREFIX)


@pytest.mark.parametrize(
    ("name", "dtype", "metadata", "message"),
    [
        ("parameter.x", "F32", {}, "metadata: no 'trainer_state'"),
        ("momentum.x", "F32", None, "tensor 'momentum.x' of F32"),
        ("parameter.x", "BF16", None, "tensor 'parameter.x' of BF16"),
        ("parameter.x", "F32", {"trainer_state": {"optimizer_steps": 2}}, "corrupt: weight_version"),
    ],
)
def test_other_tensors_are_not_taken_for_a_checkpoint(name, dtype, metadata, message):
    store = MemoryStore()
    state = {"weight_version": 0, "optimizer_steps": 0, "rng_state": ""}
    metadata = {"trainer_state": state} if metadata is None else metadata
    block = tensor_sets.TensorBlock(dtype, (1,), bytes(4 if dtype == "F32" else 2))
    tensor_sets.publish(store, PREFIX, {name: block}, metadata, 1 << 20)
    with pytest.raises(CorruptObject, match=message):
        checkpoint.read(store, PREFIX)


def test_the_checkpoint_of_another_model_is_refused(build, tmp_path):
    policy, optimizer = new_trainer(build)
    store = MemoryStore()
    checkpoint.save(store, PREFIX, policy, optimizer, TrainerState.capture(0, optimizer))
    (tmp_path / "untied").mkdir()
    other = Policy(tmp_path / "untied", write_model(tmp_path / "untied", tied=False), TrainerConfig(device="cpu"))
    with pytest.raises(ValueError, match=r"missing 'lm_head\.weight'"):
        checkpoint.restore(checkpoint.read(store, PREFIX), other, PolicyOptimizer(other.parameters(), CONFIG))
