"""An iteration trained by two ranks against the same iteration trained by one."""

import shutil

import pytest
import torch

from storage.clock import ManualClock
from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout, records
from storage.records.records import TrainingRecord
from storage.stores.connect import connect
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import pull_version
from tasks.learning import checkpoint
from tasks.sampling.engines.weight_tensors import as_torch
from tests.small_run import (
    commit_iteration,
    config,
    learned,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

pytestmark = pytest.mark.slow

# A large eps: Adam's step is otherwise the sign of a gradient, also of one that is nothing but rounding.
OPTIMIZER = {"learning_rate": 1e-3, "eps": 1e-4}
RUNS = {
    "ppo": {
        "algorithm": {"preset": "ppo", "num_epochs": 2, "num_mini_batches": 2, "mask_truncated": True},
        "critic": {"optimizer": OPTIMIZER},
    },
    "grpo with adapters": {"algorithm": {"preset": "grpo"}, "lora": {"rank": 4, "alpha": 8.0}},
}


def tensors(directory, version=1):
    """What an iteration published, and what its checkpoints hold."""
    store = connect(str(directory))
    found = {name: as_torch(block) for name, block in pull_version(store, version, None, ManualClock())[1].items()}
    prefixes = [layout.checkpoint(version)]
    if store.list(layout.critic_checkpoint(version)):
        prefixes.append(layout.critic_checkpoint(version))
    for prefix in prefixes:
        saved = checkpoint.read(store, prefix)
        for kind in (saved.parameters, saved.moments["exp_avg"], saved.moments["exp_avg_sq"]):
            found |= {f"{prefix}{id(kind)}/{name}": tensor for name, tensor in kind.items()}
    return list(found.values())


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_learn_what_one_learns(tmp_path, ranks_server, name):
    model = model_directory(tmp_path / "model")
    one, two = tmp_path / "one", tmp_path / "two"
    plan_iteration(config(str(one), model, optimizer=OPTIMIZER, **RUNS[name]))
    roll_out(str(one), 0)
    shutil.copytree(one, two)
    alone = train_small(str(one), 0)
    ranks_server.launch("train_iteration 0", two, 2)
    together = records.read(connect(str(two)), TrainingRecord, layout.training(0))
    assert learned(together.metrics) == pytest.approx(learned(alone.metrics), rel=1e-4, abs=1e-5)
    assert together.metrics["requests/train_gets"] > alone.metrics["requests/train_gets"]
    before = pull_version(connect(str(one)), 0, None, ManualClock())[1].values()
    mine, theirs = tensors(two), tensors(one)
    assert any(not torch.equal(as_torch(old), new) for old, new in zip(before, theirs, strict=False))
    assert len(mine) == len(theirs)
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    report = commit_iteration(str(two), 0)
    assert report.metrics["num_tokens"] == sum(report.lengths)


def test_two_ranks_replay_what_one_has_trained_and_store_their_shares_of_the_checkpoint(tmp_path, ranks_server):
    """Two iterations without a checkpoint; the trainer of the third replays them on two ranks, from the parts."""
    model = model_directory(tmp_path / "model")
    one, two = tmp_path / "one", tmp_path / "two"
    run = config(str(one), model, optimizer=OPTIMIZER, trainer={"checkpoint_interval": 3}, **RUNS["ppo"])
    for iteration in range(3):
        plan_iteration(run)
        roll_out(str(one), iteration)
        if iteration < 2:
            train_small(str(one), iteration)
            commit_iteration(str(one), iteration)
            sweep(connect(str(one)), RetentionConfig())
    assert connect(str(one)).list(layout.CHECKPOINTS) == []
    shutil.copytree(one, two)
    alone = train_small(str(one), 2)
    ranks_server.launch("train_iteration 2", two, 2)
    together = records.read(connect(str(two)), TrainingRecord, layout.training(2))
    assert together.metrics["replay/iterations"] == alone.metrics["replay/iterations"] == 2
    # Two ranks add in another order. What is published next refers to what one rank has published.
    assert together.metrics["replay/tensors_changed"] > alone.metrics["replay/tensors_changed"] == 0
    manifest = read_manifest(connect(str(two)), layout.weights(3))
    assert {entry.encoding for entry in manifest.tensors.values()} == {
        entry.encoding for entry in read_manifest(connect(str(one)), layout.weights(3)).tensors.values()
    }
    for left, right in zip(tensors(two, 3), tensors(one, 3), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
