"""The arms do the work they are given, and the targets say what was measured."""

import sys

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.reporting import Measured
from benchmarks.trainer import Cell, measure, running, targets, trl_version, write_model
from benchmarks.trainer_ours import micro_batches, optimizer_step
from benchmarks.trainer_work import Sample, Work, samples
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import collate
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy

SPEED_RATIO = Measured(1.35, (1.29, 1.4))
ROW = {"cell": "a", "vocab": 32_768, "speed ratio": SPEED_RATIO, "memory ratio": 0.7, "grad norm difference": 1e-7}


@pytest.mark.parametrize("ragged", [True, False])
def test_samples_are_the_same_every_time_and_as_long_as_asked_for(ragged):
    work = Work("", 512, 64, ragged=ragged)
    found = samples(work)
    assert found == samples(work)
    assert len(found) == 32
    lengths = [len(sample.completion) for sample in found]
    assert max(lengths) == 64
    assert (min(lengths) < 32) is ragged
    assert all(len(sample.prompt) + len(sample.completion) <= work.longest for sample in found)
    assert all(found[0].prompt == sample.prompt for sample in found[:8])
    assert found[0].prompt != found[8].prompt


def test_micro_batches_are_whole_groups_within_the_limit():
    rows = [Sample([1], [1] * length, 0.0) for length in (3, 3, 1, 1, 1, 1, 9, 9)]
    assert micro_batches(rows, 2, 16) == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert micro_batches(rows, 2, 1) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_our_arm_takes_the_step_of_the_plain_loss(tmp_path):
    """On policy, the gradient is that of -sum(advantage * log-prob) / tokens."""
    write_model(str(tmp_path), 64)
    work = Work(str(tmp_path), 64, 12, ragged=True, prompts=2, generations=4, prompt_length=4, responses_per_pass=3)
    tensors = load_file(tmp_path / "model.safetensors")
    rows = samples(work)
    policy, plain = (Policy(tmp_path, tensors, TrainerConfig(device="cpu")) for _ in range(2))
    metrics = optimizer_step(policy, PolicyOptimizer(policy.parameters(), OptimizerConfig()), rows, work)
    batch = collate(
        list(range(8)),
        [row.prompt for row in rows],
        [row.completion for row in rows],
        [[0.0] * len(row.completion) for row in rows],
    )
    advantages = torch.tensor([row.advantage for row in rows])
    logprobs = plain.logprobs(batch, 1.0)[0]
    (-(advantages[:, None] * logprobs).sum() / batch.response_mask.sum()).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters().values()])
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert metrics["num_tokens"] == sum(len(row.completion) for row in rows)


@pytest.mark.slow
def test_a_cell_without_trl_has_our_figures_only_and_no_targets():
    row = measure(Cell(64, 8, ragged=False), None, 2)
    assert row["tokens"] == 4 * 8 * 8
    for quantity in ("tokens/s", "user s", "peak MiB", "grad norm"):
        assert row[f"ours {quantity}"] > 0
    assert not any(name.startswith("trl") for name in row)
    assert targets([row]) == []


def test_targets_of_a_measured_row():
    assert {target.name: target.met for target in targets([ROW, {**ROW, "cell": "b", "vocab": 512}])} == {
        "tokens_per_s_over_trl_a": False,
        "peak_memory_over_trl_a": True,
        "grad_norm_difference_a": True,
        "tokens_per_s_over_trl_b": False,
        "grad_norm_difference_b": True,
    }


def test_an_arm_that_ends_and_a_python_without_trl_are_errors(tmp_path):
    work = Work(str(tmp_path), 64, 8)
    with (
        running(sys.executable, "benchmarks.no_such_arm", work) as arm,
        pytest.raises(RuntimeError, match=r"ended with status 1: .*No module named benchmarks\.no_such_arm"),
    ):
        arm.step("time")
    with pytest.raises(ValueError, match="--trl-python: value '/bin/false'"):
        trl_version("/bin/false")
