"""Advancing a run by one weight version, killed wherever it writes, against the same step undisturbed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from storage.clock import ManualClock
from storage.records import layout, model_files, prompt_table, records
from storage.records.records import TrainingRecord
from storage.records.run import read_plan
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from storage.weights import tensor_sets
from storage.weights.versions import pull_version
from tasks.configuration.run_config import parse
from tasks.learning import checkpoint
from tasks.learning.journal_follower import GroupTimeout
from tasks.learning.recorded_batches import FollowedBatches
from tasks.learning.restoring import restore_learner
from tasks.learning.trainer import IterationTrainer
from tasks.sampling.engines.weight_tensors import as_block, as_torch
from tests.dying_store import DiesAtWrite, Killed
from tests.property_examples import part_of_examples
from tests.small_run import (
    OWN_REWARD,
    commit_iteration,
    config,
    everything,
    learned,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

URL = "memory://advance"
# Two micro-batches: every further one is two more trainings for each test that kills at any write.
TWO_BATCHES = {"trainer": {"micro_batch_tokens_max": 640}}
DURABLE = ("batches/", "closed.json", "training.json", "weights/", "checkpoints/")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rolled_out(model):
    """All objects of a run whose first rollout has ended."""
    store = memory_store("advance")
    plan_iteration(config(URL, model, **TWO_BATCHES))
    roll_out(URL, 0)
    return everything(store)


@pytest.fixture(scope="module")
def undisturbed(rolled_out):
    """The store that an undisturbed step leaves, with the keys it wrote in order."""
    store = memory_store("advance", DiesAtWrite("advance", rolled_out))
    train_small(URL, 0)
    return store


def version(store, number):
    """Name -> tensor of a weight version."""
    _, blocks = pull_version(store, number, None, ManualClock())
    return {name: as_torch(block) for name, block in blocks.items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_order_of_durable_writes_is_batches_record_weights_checkpoint(undisturbed):
    """Objects of tensors are nothing before their manifests."""
    complete = [key for key in undisturbed.written if not key.endswith(".safetensors")]
    kinds = [next(kind for kind in DURABLE if kind in key) for key in complete]
    assert list(dict.fromkeys(kinds)) == list(DURABLE)
    assert kinds == sorted(kinds, key=DURABLE.index)
    assert kinds.count("batches/") >= 2
    assert not same(version(undisturbed, 0), version(undisturbed, 1))


@pytest.mark.slow
def test_killed_at_any_write_the_next_attempt_ends_with_the_same_bits(rolled_out, undisturbed):
    expected = everything(undisturbed)
    metrics = records.read(undisturbed, TrainingRecord, layout.training(0)).metrics
    for writes in range(len(undisturbed.written)):
        store = memory_store("advance", DiesAtWrite("advance", rolled_out, writes))
        with pytest.raises(Killed):
            train_small(URL, 0)
        # Objects of checkpoint and weights are written side by side.
        assert len(store.written) == writes
        store.left = 1 << 30
        record = train_small(URL, 0)
        assert (record.weight_version, learned(record.metrics)) == (1, learned(metrics))
        after = everything(store)
        # Tensor objects are named by their content, so equal names are equal bits.
        assert after.keys() == expected.keys()
        assert same(version(store, 1), version(undisturbed, 1))
        for prefix in (layout.weights(1), layout.checkpoint(1)):
            pair = [tensor_sets.read_manifest(each, prefix).tensors for each in (store, undisturbed)]
            assert pair[0] == pair[1], (writes, prefix)


PRESETS = {
    "rloo": {"importance_sampling": "auto"},
    "reinforce_plus_plus": {"mask_truncated": True, "overlong_buffer_length": 20},
    "ppo": {"num_epochs": 2, "num_mini_batches": 2},
    "dr_grpo": {},
}
# With adapters, the reference is the policy without them.
SECTIONS = {"dr_grpo": {"lora": {"rank": 4, "alpha": 8.0}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "anywhere"),
    [
        *((preset, False) for preset in PRESETS),
        *(pytest.param(preset, True, marks=pytest.mark.exhaustive) for preset in ("ppo", "dr_grpo")),
    ],
)
def test_with_another_algorithm_a_kill_changes_as_little(model, preset, anywhere):
    """Two iterations, in the second of which the policy has left its reference; killed around the recording."""
    algorithm = {"preset": preset, "kl_coef": 0.05, **PRESETS[preset]}
    store = memory_store("advance", DiesAtWrite("advance", {}))
    for iteration in range(2):
        plan_iteration(config(URL, model, algorithm=algorithm, **TWO_BATCHES, **SECTIONS.get(preset, {})))
        roll_out(URL, iteration)
        if iteration == 0:
            train_small(URL, 0)
            commit_iteration(URL, 0)
    begun, store.written = everything(store), []
    metrics = train_small(URL, 1).metrics
    assert metrics["kl"] != 0
    assert metrics["actor/grad_norm"] > 0
    around_recording = sum("batches/" in key for key in store.written) + 2
    for writes in range(len(store.written) if anywhere else around_recording):
        killed = memory_store("advance", DiesAtWrite("advance", begun, writes))
        with pytest.raises(Killed):
            train_small(URL, 1)
        killed.left = 1 << 30
        assert learned(train_small(URL, 1).metrics) == learned(metrics)
        assert same(version(killed, 2), version(store, 2))
        assert killed.list(layout.CHECKPOINTS) == store.list(layout.CHECKPOINTS)


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.07))
@given(st.lists(st.integers(0, 12), min_size=2, max_size=4))
def test_killed_again_and_again_it_ends_with_the_same_bits(rolled_out, undisturbed, kills):
    store = memory_store("advance", DiesAtWrite("advance", rolled_out))
    for writes in kills:
        store.left = writes
        try:
            train_small(URL, 0)
        except Killed:
            continue
    store.left = 1 << 30
    train_small(URL, 0)
    assert same(version(store, 1), version(undisturbed, 1))


def test_published_weights_are_not_made_again(undisturbed):
    """With them, their checkpoint and the record of the training, nothing else is looked at: no prompts are there."""
    parts = ("run.json", "plan.json", "training.json", "weights/00000001", "checkpoints/00000001/manifest.json")
    kept = {key: body for key, body in everything(undisturbed).items() if any(part in key for part in parts)}
    store = memory_store("advance", DiesAtWrite("advance", kept))
    assert train_small(URL, 0) == records.read(undisturbed, TrainingRecord, layout.training(0))
    assert store.written == []


@pytest.mark.slow
def test_published_weights_whose_checkpoint_lacks_get_it_by_a_replay_and_nothing_else_is_written(undisturbed):
    kept = {key: body for key, body in everything(undisturbed).items() if "checkpoints/" not in key}
    store = memory_store("advance", DiesAtWrite("advance", kept))
    record = train_small(URL, 0)
    assert {key.split("/")[0] for key in store.written} == {"checkpoints"}
    assert states_of(store) == states_of(undisturbed)
    assert record == records.read(undisturbed, TrainingRecord, layout.training(0))
    commit_iteration(URL, 0)
    for key in store.list(layout.CHECKPOINTS):
        store.delete(key)
    # A committed iteration's checkpoint may have been deleted.
    store.written = []
    train_small(URL, 0)
    assert store.written == []


def states_of(store):
    """The tensors of checkpoint 1 by their entries, and the trainer's state beside them."""
    manifest = tensor_sets.read_manifest(store, layout.checkpoint(1))
    return manifest.tensors, manifest.metadata["trainer_state"]


@pytest.mark.slow
def test_training_that_failed_has_published_nothing_and_can_be_tried_again(model):
    store = memory_store("advance")
    plan_iteration(config(URL, model, trainer={"group_timeout_s": 0.05}))
    with pytest.raises(GroupTimeout, match="not claimed"):
        train_small(URL, 0)
    assert not [key for key in store.list("") if "00000001/manifest" in key or "training" in key]
    roll_out(URL, 0)
    assert train_small(URL, 0).weight_version == 1


@pytest.mark.parametrize("part", ["manifest.json", ".safetensors"])
def test_damaged_weights_or_checkpoints_are_named_and_nothing_is_published(part, rolled_out, undisturbed, tmp_path):
    key = next(key for key in rolled_out if key.startswith(layout.weights(0)) and key.endswith(part))
    store = memory_store("advance", DiesAtWrite("advance", rolled_out | {key: rolled_out[key][:-1]}))
    with pytest.raises(CorruptObject) as caught:
        train_small(URL, 0)
    assert caught.value.key == key
    assert store.written == []
    objects = everything(undisturbed)
    model_files.download(undisturbed, tmp_path)
    key = next(key for key in objects if key.startswith(layout.checkpoint(1)) and key.endswith(part))
    store = memory_store("advance", DiesAtWrite("advance", objects | {key: objects[key][:-1]}))
    with pytest.raises(CorruptObject) as caught:
        restore_learner(store, 1, parse(read_plan(store, 0).config), tmp_path, ManualClock())
    assert caught.value.key == key


@pytest.mark.slow
def test_resumed_at_every_iteration_it_equals_a_trainer_that_never_ended(model, tmp_path):
    """Three iterations whose learner is restored each time, against one learner kept in memory."""
    store = memory_store("advance")
    schedule = {"learning_rate": 1e-2, "warmup_steps": 2, "schedule": "linear", "total_steps": 5, "weight_decay": 0.01}
    run = config(URL, model, rewards=OWN_REWARD, optimizer=schedule, algorithm={"kl_coef": 0.05})
    for iteration in range(3):
        plan_iteration(run)
        roll_out(URL, iteration)
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
    model_files.download(store, tmp_path)
    learner = restore_learner(store, 0, run, tmp_path, ManualClock())
    for iteration in range(3):
        step_in_memory(store, iteration, learner)
    assert same(learner.policy.tensors(), version(store, 3))
    assert learner.optimizer.steps == 3
    assert not same(version(store, 2), version(store, 3))


def expects_no_wait(waiting):
    assert not waiting


def step_in_memory(store, iteration, learner):
    """What an attempt does between restoring and saving, on the batches that are recorded."""
    plan = read_plan(store, iteration)
    run = parse(plan.config)
    clock = ManualClock()
    IterationTrainer(
        store,
        plan,
        prompts=prompt_table.read_prompts(store, plan),
        learner=learner,
        batches=FollowedBatches(store, plan, clock, 1.0, expects_no_wait),
        algorithm=run.algorithm,
        trainer=run.trainer,
        clock=clock,
    ).step()


@pytest.mark.slow
def test_weights_are_published_in_the_dtype_of_the_first(tmp_path):
    model = tiny_model(tiny_config(hidden_size=32, intermediate_size=48)).to(torch.bfloat16)
    store = memory_store("advance")
    plan_iteration(config(URL, save_tiny_model(tmp_path, model)))
    roll_out(URL, 0)
    train_small(URL, 0)
    published = tensor_sets.read_manifest(store, layout.weights(1))
    assert {entry.dtype for entry in published.tensors.values()} == {"BF16"}
    assert published.base == 0
    assert {entry.encoding for entry in published.tensors.values()} <= {"same", "diff-zstd", "full"}
    saved = tensor_sets.read_manifest(store, layout.checkpoint(1))
    assert {entry.dtype for entry in saved.tensors.values()} == {"F32"}


@pytest.mark.slow
def test_every_tensor_is_published_in_the_dtype_of_the_first(tmp_path):
    """One norm in float32 makes nothing else so, and of a tied tensor either name may be the one that is stored."""
    model = tiny_model(tiny_config(hidden_size=32, intermediate_size=48)).to(torch.bfloat16)
    directory = save_tiny_model(tmp_path, model)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-5
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight").float()
    save_file(tensors, file)
    store = memory_store("advance")
    plan_iteration(config(URL, directory, optimizer={"learning_rate": 1e-6}))
    roll_out(URL, 0)
    train_small(URL, 0)
    published = tensor_sets.read_manifest(store, layout.weights(1)).tensors
    assert {name for name, entry in published.items() if entry.dtype == "F32"} == {
        "model.norm.weight",
        "lm_head.weight",
    }
    assert {entry.dtype for entry in published.values()} == {"F32", "BF16"}
    saved = checkpoint.read(store, layout.checkpoint(1)).parameters
    saved["lm_head.weight"] = saved.pop("model.embed_tokens.weight")  # a checkpoint has the module's names
    assert all(torch.equal(value, saved[name].to(value.dtype)) for name, value in version(store, 1).items())
    assert not torch.equal(version(store, 1)["model.norm.weight"], version(store, 0)["model.norm.weight"])
    assert published["model.norm.weight"].encoding == "diff-zstd"


@pytest.mark.slow
def test_the_run_goes_on_from_the_checkpoint_that_another_trainer_has_stored_first(rolled_out, undisturbed):
    """With other last bits, just before ours, whose weights are published already."""
    first = checkpoint.read(undisturbed, layout.checkpoint(1))
    blocks = {f"parameter.{name}": as_block(value * (1 + 1e-6)) for name, value in first.parameters.items()}
    for kind, moments in (("exp_avg", first.moments["exp_avg"]), ("exp_avg_sq", first.moments["exp_avg_sq"])):
        blocks |= {f"{kind}.{name}": as_block(value) for name, value in moments.items()}
    other = MemoryStore()
    metadata = tensor_sets.read_manifest(undisturbed, layout.checkpoint(1)).metadata
    tensor_sets.publish(other, layout.checkpoint(1), blocks, metadata)

    class Overtaken(DiesAtWrite):
        def create(self, key, body):
            if key == layout.manifest(layout.checkpoint(1)):
                self._objects.update(everything(other))
            return super().create(key, body)

    store = memory_store("advance", Overtaken("advance", rolled_out))
    assert train_small(URL, 0).weight_version == 1
    assert same(version(store, 1), version(undisturbed, 1))
    assert states_of(store) == states_of(other)
    assert states_of(store) != states_of(undisturbed)
    commit_iteration(URL, 0)
    plan_iteration(parse(read_plan(store, 0).config))
    roll_out(URL, 1)
    assert train_small(URL, 1).metrics.get("replay/iterations", 0.0) == 0.0
    # Differences to what was published lead to the new version, whatever the state was from which it was trained.
    assert not same(version(store, 2), version(store, 1))


@pytest.mark.slow
def test_a_small_step_is_published_as_a_difference_to_what_the_policy_was(tmp_path):
    model = tiny_model(tiny_config(hidden_size=32, intermediate_size=48)).to(torch.bfloat16)
    store = memory_store("advance")
    plan_iteration(config(URL, save_tiny_model(tmp_path, model), optimizer={"learning_rate": 1e-5}))
    roll_out(URL, 0)
    train_small(URL, 0)
    prefix = layout.weights(1)
    first = tensor_sets.read_manifest(store, prefix)
    assert not [name for name, entry in first.tensors.items() if entry.encoding == "full" and entry.num_bytes > 200]
    assert sum(entry.bytes for entry in first.objects.values()) < 0.3 * first.num_bytes


@pytest.mark.slow
def test_every_so_many_versions_are_published_whole(model, monkeypatch):
    monkeypatch.setattr("tasks.learning.publication.WEIGHTS_FULL_INTERVAL", 1)
    store = memory_store("advance")
    plan_iteration(config(URL, model))
    roll_out(URL, 0)
    train_small(URL, 0)
    assert tensor_sets.read_manifest(store, layout.weights(1)).base is None
    assert not same(version(store, 0), version(store, 1))
