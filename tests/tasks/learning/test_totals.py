import threading
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
import torch

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.records import TrainingRecord
from storage.records.run import next_iteration, read_plan, read_run
from storage.weights.tensor_sets import read_manifest
from tasks.configuration.run_config import dump
from tasks.learning import checkpoint
from tasks.learning.importance import log_ratio_counts
from tasks.learning.totals import StepTotals, TooStaleError, check_staleness, combined, staleness_totals
from tasks.preparing.iteration import prepare
from tests.dying_store import DiesAtWrite, Killed
from tests.journals import a_plan
from tests.small_run import (
    EXECUTION,
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

RATIOS = [f"importance/ratio_{name}" for name in ("min", "p01", "p50", "p99", "max")]


def test_totals_add_up_and_divide_by_hand():
    first = StepTotals(
        responses=(4, 5),
        tokens=3,
        read=11,
        shared=2,
        computed=12,
        loss=1.5,
        kl=0.3,
        entropy=6.0,
        clipped_low=1.0,
        ratio_max=1.2,
    )
    second = StepTotals(responses=(2,), tokens=5, loss=0.5, kl=0.1, entropy=2.0, clipped_high=2.0, ratio_max=1.1)
    second += StepTotals(staleness=4, staleness_max=2)
    total = combined([first, second])
    assert total.responses == (4, 5, 2)
    assert total.metrics("token-mean") == pytest.approx(
        {
            "loss": 0.25,
            "actor/pg_loss": 0.0,
            "kl": 0.05,
            "entropy": 1.0,
            "actor/ppo_kl": 0.0,
            "mismatch_kl": 0.0,
            "clip_ratio/low_mean": 0.125,
            "clip_ratio/high_mean": 0.25,
            "clip_ratio/region_mean": 0.375,
            "ratio_max": 1.2,
            "num_tokens": 8.0,
            "padding_share": 0.25,
            "shared_prompt_share": 2 / 11,
            "trajectory_staleness": 0.5,
            "staleness_max": 2.0,
            **dict.fromkeys(RATIOS, 0.0),
        }
    )
    assert total.metrics("seq-mean-token-mean")["loss"] == pytest.approx(2 / 3)


def test_every_field_of_two_totals_is_in_their_sum():
    """Whatever fields there are: numbers are added, the smallest and largest kept, bins and names kept apart."""
    first, second, expected = {}, {}, {}
    for place, each in enumerate(fields(StepTotals), start=1):
        one, other = place, 100 * place
        if isinstance(each.default, tuple):
            first[each.name], second[each.name] = (one, one + 1), (other, other + 1)
            by_bin = (one + other, one + other + 2)
            expected[each.name] = by_bin if each.name == "log_ratio_counts" else (one, one + 1, other, other + 1)
            continue
        if each.default_factory is dict:
            first[each.name], second[each.name] = {"a": one, "b": one}, {"b": other, "c": other}
            expected[each.name] = {"a": one, "b": one + other, "c": other}
            continue
        first[each.name], second[each.name] = one, other
        expected[each.name] = one + other
        if each.name.endswith(("_min", "_max")):
            expected[each.name] = one if each.name.endswith("_min") else other
    assert asdict(StepTotals(**first) + StepTotals(**second)) == expected
    assert asdict(StepTotals(**second) + StepTotals()) == second


def test_importance_is_of_the_whole_step_and_only_where_there_is_some():
    """Weights 3 and 1 in the first micro-batch, 2, 1 and 0 in the second."""
    first = StepTotals(responses=(1,), tokens=2, importance_tokens=2, importance=4.0, importance_square=10.0)
    second = StepTotals(responses=(2,), tokens=3, importance_tokens=3, importance=3.0, importance_square=5.0)
    second += StepTotals(importance_clipped=2.0)
    metrics = combined([first, second]).metrics("token-mean")
    found = {name: value for name, value in metrics.items() if name.startswith("importance/") and name not in RATIOS}
    assert found == pytest.approx(
        {"importance/ess": 49 / 75, "importance/weight_mean": 1.4, "importance/clipped_frac": 0.4}
    )
    unweighted = StepTotals(responses=(1,), tokens=1).metrics("token-mean")
    assert [name for name in unweighted if "importance" in name] == RATIOS


def test_ratios_to_the_sampler_are_of_all_micro_batches():
    """Ratios 1/2 and 1 in the first, 1, 1 and 4 in the second; p01 of five is the smallest, p99 the largest."""
    parts = []
    for ratios in ([0.5, 1.0], [1.0, 1.0, 4.0]):
        logs = torch.tensor([ratios], dtype=torch.float64).log()
        counts = log_ratio_counts(logs, torch.ones_like(logs, dtype=torch.bool))
        bounds = {"sampler_ratio_min": min(ratios), "sampler_ratio_max": max(ratios)}
        parts.append(StepTotals(responses=(0,), tokens=len(ratios), log_ratio_counts=tuple(counts.tolist()), **bounds))
    metrics = combined([*parts, StepTotals(left_out=2)]).metrics("token-mean")
    assert [metrics[name] for name in RATIOS] == pytest.approx([0.5, 0.5, 1.0, 4.0, 4.0], rel=1 / 128)
    assert (metrics["importance/ratio_min"], metrics["importance/ratio_max"]) == (0.5, 4.0)


def test_what_is_left_out_counts_as_responses_without_tokens():
    """As in verl and TRL: of 5 responses 3 are masked, and a mean over responses is a mean over 5."""
    trained, left = StepTotals(responses=(1, 2), tokens=5, loss=1.0), StepTotals(left_out=3)
    means = dict.fromkeys(("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"), 5.0)
    for mode, divisor in ({"token-mean": 5.0} | means).items():
        assert combined([trained, left]).denominator(mode) == divisor
        assert combined([left, left]).denominator(mode) == 1.0
        assert set(combined([left]).metrics(mode).values()) == {0.0}


def test_an_empty_step_has_no_metrics():
    assert combined([]) == StepTotals()
    with pytest.raises(ValueError, match="0 responses with 0 tokens"):
        combined([]).metrics("token-mean")


URL = "memory://staleness"
ITERATIONS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ahead(model):
    return config(URL, model, algorithm={"max_staleness": 1})


def plan_next(settings):
    prepare(settings, EXECUTION, ManualClock(), ahead=1)


def one_after_another(settings):
    """As one machine runs it; the store that is left."""
    store = memory_store("staleness")
    plan_iteration(settings)
    for iteration in range(ITERATIONS):
        roll_out(URL, iteration)
        if iteration < ITERATIONS - 1:
            plan_next(settings)
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
    return store


def side_by_side(settings):
    """As a cluster runs it: the next iteration is rolled out while this one is trained on."""
    store = memory_store("staleness")
    plan_iteration(settings)
    roll_out(URL, 0)
    for iteration in range(ITERATIONS):
        trainer = threading.Thread(target=train_small, args=(URL, iteration))
        if iteration < ITERATIONS - 1:
            plan_next(settings)
        trainer.start()
        if iteration < ITERATIONS - 1:
            roll_out(URL, iteration + 1)
        trainer.join()
        commit_iteration(URL, iteration)
    return store


def digests(store, version):
    return {name: entry.digest for name, entry in read_manifest(store, layout.weights(version)).tensors.items()}


def trained(store, iteration):
    return records.read(store, TrainingRecord, layout.training(iteration)).metrics


@pytest.mark.slow
def test_the_overlap_changes_no_number(ahead):
    alone, together = one_after_another(ahead), side_by_side(ahead)
    assert next_iteration(alone) == next_iteration(together) == ITERATIONS
    for iteration in range(ITERATIONS):
        assert read_plan(alone, iteration).weight_version == read_plan(together, iteration).weight_version
        assert learned(trained(alone, iteration)) == learned(trained(together, iteration))
        assert digests(alone, iteration + 1) == digests(together, iteration + 1)


@pytest.mark.slow
def test_an_iteration_trains_its_own_version_on_tokens_of_the_one_before(ahead):
    store = one_after_another(ahead)
    assert [read_plan(store, iteration).weight_version for iteration in range(ITERATIONS)] == [0, 0, 1]
    metrics = [trained(store, iteration) for iteration in range(ITERATIONS)]
    assert [each["trajectory_staleness"] for each in metrics] == [0.0, 1.0, 1.0]
    assert [each["staleness_max"] for each in metrics] == [0.0, 1.0, 1.0]
    assert all("importance/ess" in each for each in metrics)  # "auto", where staleness may be more than 0
    steps = [checkpoint.read(store, layout.checkpoint(version)).state.optimizer_steps for version in (1, 2, 3)]
    assert steps == [1, 2, 3]
    versions = [digests(store, version) for version in range(ITERATIONS + 1)]
    assert all(versions[k] != versions[k + 1] for k in range(ITERATIONS))


@pytest.mark.slow
def test_a_trainer_killed_at_any_write_ends_with_the_same_bits(ahead):
    ahead = replace(ahead, trainer=replace(ahead.trainer, micro_batch_tokens_max=640))
    store = memory_store("staleness")
    plan_iteration(ahead)
    roll_out(URL, 0)
    plan_next(ahead)
    train_small(URL, 0)
    roll_out(URL, 1)
    begun = everything(store)
    undisturbed = memory_store("staleness", DiesAtWrite("staleness", begun))
    train_small(URL, 1)
    writes = (1 << 30) - undisturbed.left
    assert writes > 4
    for number in range(writes):
        store = memory_store("staleness", DiesAtWrite("staleness", begun, number))
        with pytest.raises(Killed):
            train_small(URL, 1)
        store.left = 1 << 30
        assert learned(train_small(URL, 1).metrics) == learned(trained(undisturbed, 1))
        assert digests(store, 2) == digests(undisturbed, 2)


@pytest.mark.parametrize(
    ("versions", "allowed", "refused"),
    [((3, 3), 0, None), ((3, 2), 1, None), ((9, 1), 8, None), ((3, 2), 0, "3 to 3"), ((9, 0), 8, "1 to 9")],
)
def test_what_is_too_stale_is_refused_with_both_versions(versions, allowed, refused):
    trains, sampled = versions
    plan = a_plan(groups=1, generations=2, iteration=trains, weight_version=sampled)
    if refused is None:
        check_staleness(plan, allowed)
        return
    message = (
        f"iteration {trains}: it trains weight version {trains} on tokens of weight version {sampled}; "
        f"allowed with algorithm.max_staleness {allowed}: {refused}$"
    )
    with pytest.raises(TooStaleError, match=message):
        check_staleness(plan, allowed)


def test_tokens_of_the_future_are_refused():
    with pytest.raises(TooStaleError, match=r"weight version 4; allowed with algorithm\.max_staleness 2: 0 to 1"):
        check_staleness(a_plan(groups=1, generations=2, iteration=1, weight_version=4), 2)


@pytest.mark.slow
def test_the_trainer_refuses_before_anything_is_trained_or_written(model):
    settings = config(URL, model)
    store = memory_store("staleness")
    plan_iteration(settings)
    roll_out(URL, 0)
    train_small(URL, 0)
    commit_iteration(URL, 0)
    plan_iteration(settings)
    records.put(store, layout.plan(1), replace(read_plan(store, 1), weight_version=0))
    roll_out(URL, 1)
    before = {key: body for key, body in everything(store).items() if key != layout.LEASE_BEAT}
    with pytest.raises(TooStaleError, match="trains weight version 1 on tokens of weight version 0; allowed with"):
        train_small(URL, 1)
    assert {key: body for key, body in everything(store).items() if key != layout.LEASE_BEAT} == before


def test_staleness_by_hand():
    assert staleness_totals(np.array([3, 3, 1], dtype=np.uint32), 3).staleness == 2
    assert staleness_totals(np.array([3, 3, 1], dtype=np.uint32), 3).staleness_max == 2
    assert staleness_totals(np.zeros(0, dtype=np.uint32), 3).staleness_max == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rollout", "algorithm", "weighted"),
    [
        ({}, {}, False),
        ({"engine": "vllm"}, {}, True),
        ({"engine": "auto"}, {}, True),
        ({"engine": "torch", "dtype": "bfloat16"}, {}, True),
        ({"engine": "vllm"}, {"importance_sampling": "none"}, False),
        ({"engine": "vllm"}, {"old_logprobs": "sampler"}, False),
    ],
)
def test_the_configuration_decides_whether_tokens_are_weighted(model, rollout, algorithm, weighted):
    """The journal is the same; only what the configuration in force says of the engine differs."""
    store = memory_store("staleness")
    plan_iteration(config(URL, model))
    roll_out(URL, 0)
    told = config(URL, model, rollout=rollout, algorithm=algorithm)
    # In a real run neither may change; the journal's tokens do not say which engine wrote them.
    records.put(store, layout.RUN, replace(read_run(store), config=dump(told)))
    records.put(store, layout.plan(0), replace(read_plan(store, 0), config=dump(told)))
    store.delete(layout.settings(0))
    metrics = train_small(URL, 0).metrics
    assert ("importance/ess" in metrics) is weighted
    ratios = [metrics[f"importance/ratio_{name}"] for name in ("min", "p01", "p50", "p99", "max")]
    assert ratios == sorted(ratios)
    assert ratios[0] < ratios[-1]
