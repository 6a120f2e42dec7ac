"""The asynchronous TRL's side of the contract, by a loop that calls what TRL's AsyncGRPOTrainer calls, in its order."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gleaner
from tasks.external.rollouts import Rollouts
from tasks.external.trl_worker import RolloutWorker, TrlMisfit
from tests.external_program import arrays, process_dies, settings, versions
from tests.small_run import memory_store, roll_out

# A step of the run is two optimizer steps, each of two micro-batches of three samples.
EVERY, MICRO_BATCHES, SAMPLES, STEPS = 2, 2, 3, 4
STALE = {"algorithm": {"max_staleness": 1}, "retention": {"keep_weights": 9}}


class Rolled(Rollouts):
    """Rollouts whose members have generated before the groups are asked for."""

    def next(self, step):
        groups = super().next(step)
        roll_out(self.url, step)
        return groups


def arguments(**changes):
    """What the adapter uses of AsyncGRPOConfig."""
    given = {"num_generations": 3, "max_completion_length": 40, "temperature": 1.0, "token_budget": 0}
    given |= {"max_staleness": 1, "world_size": 1, "weight_sync_steps": EVERY}
    given |= {"per_device_train_batch_size": SAMPLES, "gradient_accumulation_steps": MICRO_BATCHES}
    return SimpleNamespace(**(given | changes))


def comparable(sample, trls, ours):
    """A sample's values with the run's version in place of TRL's."""
    lists = (sample.input_ids.tolist(), sample.completion_mask.tolist(), sample.old_log_probs.tolist())
    return (*lists, sample.advantage, sample.group_id, sample.model_version - trls + ours)


class Trl:
    """TRL's process: its state, its checkpoint, and what it trained on by optimizer step."""

    def __init__(self, weights):
        self.done, self.weights = 0, {name: torch.tensor(array) for name, array in weights.items()}
        self.saved = (0, self.weights)
        self.trained = {}

    def life(self, worker):
        """Train from the checkpoint; yields wherever the process may die."""
        self.done, self.weights = self.saved
        version, ahead = 0, []

        def sync():
            nonlocal version
            worker.pause()
            worker.send_weights(iter(self.weights.items()))
            worker.resume()
            version += 1
            worker.update_model_version(version)

        worker.check(arguments())
        worker.begin(self.done)
        worker.init_weight_transfer()
        sync()
        yield
        worker.start()
        while self.done < STEPS:
            # The data loader takes one micro-batch ahead.
            while len(ahead) < (MICRO_BATCHES + 1) * SAMPLES:
                sample = worker.rollout_buffer.get(timeout=5.0)
                assert version - sample.model_version <= 1
                ahead.append(comparable(sample, version, self.done // EVERY))
            yield
            batch, ahead = ahead[: MICRO_BATCHES * SAMPLES], ahead[MICRO_BATCHES * SAMPLES :]
            number = int(hashlib.sha256(repr([each[:-1] for each in batch]).encode()).hexdigest()[:8], 16) % 97 - 48
            self.trained.setdefault(self.done, batch)
            assert self.trained[self.done] == batch
            self.weights = {name: tensor + number * 1e-4 for name, tensor in self.weights.items()}
            self.done += 1
            worker.follow(self.done)
            if self.done % EVERY == 0:
                sync()
            yield
            self.saved = (self.done, self.weights)
            yield
        worker.stop()


def new_run(name, model):
    memory_store(name)
    given = settings(f"memory://{name}", model, **STALE)
    with Rollouts(given) as first:
        first.next(0)
    return given, Trl(arrays(given.run.url, 0))


def test_a_step_is_what_is_trained_between_two_syncs(model):
    given, trl = new_run("trl-worker", model)
    for _ in trl.life(RolloutWorker(Rolled(given))):
        pass
    run = gleaner.open(given.run.url)
    assert list(run.iterations) == [0, 1]
    newest = arrays(given.run.url, 2)
    assert all((newest[name] == tensor.numpy()).all() for name, tensor in trl.weights.items())
    rows = {(row["group"], tuple(row["token_ids"])): row for row in run.responses(1).to_pylist()}
    samples = [sample for done in (2, 3) for sample in trl.trained[done]]
    assert len(samples) == len(rows) == 12
    assert {sample[-1] for sample in samples} == {0}
    rewards = {}
    for ids, mask, logprobs, advantage, group, _ in samples:
        own = [at for at, is_own in enumerate(mask) if is_own]
        assert own == list(range(own[0], len(ids)))
        row = rows[group - 4, tuple(ids[own[0] :])]
        assert [logprobs[at] for at in own] == row["logprobs"]
        assert set(logprobs[: own[0]]) == {0.0}
        rewards.setdefault(group, []).append((row["reward"], advantage))
    for pairs in rewards.values():
        values = np.array([reward for reward, _ in pairs])
        expected = (values - values.mean()) / (values.std() + 1e-8)
        np.testing.assert_allclose([advantage for _, advantage in pairs], expected)


def test_a_trl_that_dies_anywhere_trains_on_the_same_samples_and_publishes_the_same(model):
    given, trl = new_run("trl-worker-undisturbed", model)
    points = sum(1 for _ in trl.life(RolloutWorker(Rolled(given))))
    published = versions(given.run.url)
    assert points == 1 + 3 * STEPS
    for point in range(points):
        other, dying = new_run(f"trl-worker-{point}", model)
        life = dying.life(RolloutWorker(Rolled(other)))
        for _ in range(point + 1):
            next(life)
        process_dies()
        for _ in dying.life(RolloutWorker(Rolled(other))):
            pass
        assert dying.trained == trl.trained, f"died at {point}"
        assert versions(other.run.url) == published, f"died at {point}"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"num_generations": 4},
            "num_generations: value 4 in TRL's configuration; allowed with run.num_generations: 3",
        ),
        ({"top_p": 0.9}, r"top_p: value 0.9 .* allowed with sampling.top_p: 1.0"),
        ({"token_budget": None}, "token_budget: value None in TRL's configuration; allowed: 0"),
        ({"max_staleness": 0}, r"max_staleness: value 0 .* at least algorithm.max_staleness \(1\)"),
        ({"world_size": 2}, "accelerate: value 2 processes"),
        ({"weight_sync_steps": 1}, r"weight_sync_steps: value 6 .* run.num_generations \(12\)"),
    ],
)
def test_a_setting_of_trl_that_cannot_be_is_refused_in_one_line(model, changes, line):
    worker = RolloutWorker(Rollouts(settings("memory://trl-worker-refused", model, **STALE)))
    with pytest.raises(TrlMisfit, match=line):
        worker.check(arguments(**changes))


def test_a_run_that_an_execution_plans_is_refused_in_one_line(model):
    followed = Rollouts(settings("memory://trl-worker-refused", model, **STALE), follows=True)
    with pytest.raises(TrlMisfit, match="config: memory://trl-worker-refused, which an execution plans; allowed"):
        RolloutWorker(followed)


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"data": {"source": "submitted"}},
            r"data\.source: value 'submitted'; allowed with gleaner\.trl\.asynchronous",
        ),
        ({"rewards": []}, r"rewards: value \[\]"),
        ({"algorithm": {"max_staleness": 0}}, r"algorithm\.max_staleness: value 0; .* at least 1"),
        (
            {"data": {"source": "arithmetic", "replay": {"runs": ["memory://other@0:1"]}}},
            r"data\.replay: value 'given'",
        ),
    ],
)
def test_a_run_that_trl_cannot_train_is_refused_in_one_line(model, sections, line):
    with pytest.raises(TrlMisfit, match=line):
        RolloutWorker(Rollouts(settings("memory://trl-worker-refused", model, **(STALE | sections))))
