import json
import random
from pathlib import Path

import pytest

from benchmarks.resume_training import (
    PHASES,
    Kill,
    Pace,
    draw_kills,
    due_s,
    equal_tensors,
    likeness,
    moved_share,
    phase_of,
    stamps,
    unnamed_objects,
)
from storage.records import layout, records
from storage.records.records import BatchRecord, GradedResponse, TrainingRecord
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.weights import tensor_sets
from storage.weights.tensor_sets import TensorBlock
from tests.forked import ForkedScript

ROOT = Path(__file__).parents[2]
COMMAND = ["benchmarks.resume_training", "--json"]
SMALLEST = ["--runs", "1", "--iterations", "1", "--prompts", "8"]
PACE = Pace(begun_s=(1.0, 2.0, 3.0), publishing_s=4.0, saved_s=6.0)


def block(*values: int) -> TensorBlock:
    return TensorBlock("U8", (len(values),), bytes(values))


def trained(store, *, published=9, moment=7, reward=1.0, loss=0.5, steps=1):
    """What a trainer leaves of iteration 0: a micro-batch, what it measured, a checkpoint and weights."""
    graded = GradedResponse(
        response=0,
        length=3,
        policy_length=3,
        finish_reason="stop",
        lineage=(),
        reward=reward,
        rewards={"arithmetic": reward},
    )
    training = TrainingRecord(
        iteration=0, weight_version=1, metrics={"loss": loss}, reward_errors=(), started_at_s=1.0, ended_at_s=2.0
    )
    records.put(store, layout.batch(0, 0), BatchRecord(iteration=0, number=0, responses=(graded,)))
    records.put(store, layout.training(0), training)
    tensor_sets.publish(
        store,
        layout.checkpoint(1),
        {"parameter.a": block(1), "exp_avg.a": block(moment)},
        {"trainer_state": {"steps": steps}},
    )
    tensor_sets.publish(store, layout.weights(0), {"a": block(3), "b": block(4)}, {})
    tensor_sets.publish(store, layout.weights(1), {"a": block(3), "b": block(published)}, {})
    return store


def test_one_kill_in_three_is_for_the_end_of_the_step():
    kills = [draw_kills(random.Random(seed), 3) for seed in range(20)]
    assert all(sum(kill.at_end for kill in drawn) == 1 for drawn in kills)
    assert {next(number for number, kill in enumerate(drawn) if kill.at_end) for drawn in kills} == {0, 1, 2}
    shares = [kill.share for drawn in kills for kill in drawn]
    assert 0 <= min(shares) < 0.1
    assert 0.9 < max(shares) < 1
    assert draw_kills(random.Random(0), 3) == kills[0]
    assert draw_kills(random.Random(0), 0) == []


def test_moments_are_counted_from_the_start_or_from_the_weights_of_a_life_however_late_it_is():
    assert due_s(Kill(at_end=False, share=0.5), PACE, []) == 3.0
    at_end = Kill(at_end=True, share=0.5)
    assert due_s(at_end, PACE, [1.5, 2.5]) is None
    assert due_s(at_end, PACE, [1.0, 2.0, 3.0]) == 5.0
    assert due_s(at_end, PACE, [1.5, 2.5, 5.0]) == 7.0


def test_a_phase_is_known_from_what_a_life_left(tmp_path):
    store = connect(str(tmp_path))
    assert [phase_of(tmp_path, 0, share, set()) for share in (0, 0.5, 1)] == list(PHASES[:3])
    store.put(layout.tensor_object(layout.weights(1), "object"), b"tensors")
    assert phase_of(tmp_path, 0, 1, set()) == "publication"
    assert phase_of(tmp_path, 0, 1, {"object.safetensors"}) == "optimizer step"
    store.put(layout.manifest(layout.weights(1)), b"manifest")
    assert phase_of(tmp_path, 0, 0, {"manifest.json", "object.safetensors"}) == "checkpoint"
    store.put(layout.manifest(layout.checkpoint(1)), b"manifest")
    assert phase_of(tmp_path, 0, 1, set()) == "exit"


def test_an_object_that_is_written_again_with_the_same_bytes_has_another_stamp(tmp_path):
    store = connect(str(tmp_path))
    for key in ("run.json", layout.training(0), layout.LEASE_BEAT):
        store.put(key, b"bytes")
    (tmp_path / ".tmp-unfinished").write_bytes(b"by")
    before = stamps(tmp_path)
    assert before.keys() == {"run.json", layout.training(0)}
    assert not store.create(layout.training(0), b"bytes")
    assert stamps(tmp_path) == before
    store.put(layout.training(0), b"bytes")
    assert {key for key, stamp in stamps(tmp_path).items() if before[key] != stamp} == {layout.training(0)}


def test_objects_of_another_attempt_are_those_that_no_manifest_names():
    store = trained(MemoryStore())
    assert unnamed_objects(store, 1) == []
    stray = layout.tensor_object(layout.checkpoint(1), "stray")
    store.put(stray, b"of other tensors")
    assert unnamed_objects(store, 1) == [stray]


def test_tensors_are_equal_by_name_shape_and_bits():
    mine = {"a": block(1, 2), "b": block(3), "c": block(4)}
    assert equal_tensors(mine, dict(mine)) == 3
    assert equal_tensors(mine, {"a": block(1, 9), "b": TensorBlock("U8", (1, 1), bytes([3])), "d": block(4)}) == 0


@pytest.mark.parametrize(
    ("changes", "equal", "records_equal"),
    [
        ({}, 4, True),
        ({"published": 8}, 3, True),
        ({"moment": 8}, 3, True),
        ({"reward": 0.0}, 4, False),
        ({"loss": 0.25}, 4, False),
        ({"steps": 2}, 4, False),
    ],
)
def test_whatever_a_copy_has_otherwise_is_seen(changes, equal, records_equal):
    origin, copy = trained(MemoryStore()), trained(MemoryStore(), **changes)
    assert likeness(copy, origin, 1) == {
        "tensors": 4,
        "equal": equal,
        "records_equal": records_equal,
        "unnamed": [],
    }


def test_tensors_that_a_step_left_alone_are_not_counted_as_moved():
    assert moved_share(trained(MemoryStore()), 1) == 0.5


@pytest.mark.slow
@pytest.mark.exhaustive
def test_smallest_run_meets_its_targets():
    ended = ForkedScript(*COMMAND, *SMALLEST)
    told, errors = ended.communicate(timeout=600)
    assert ended.returncode == 0, errors
    assert "Warning" not in errors
    summary = json.loads(told.splitlines()[-1])
    assert summary["benchmark"] == "resume_training"
    assert len(summary["targets"]) == 8
    # Where few kills strike is a matter of chance.
    unmet = {name for name, target in summary["targets"].items() if not target["met"]}
    assert unmet <= {"kills_at_checkpoint_or_publication"}
    calm, killed = summary["rows"]
    assert (calm["kills"], calm["micro-batches trained"], calm["replayed from records"]) == (
        0,
        summary["conditions"]["micro_batches"],
        0,
    )
    assert summary["conditions"]["micro_batches"] >= 4
    assert killed["kills"] == sum(summary["kills_by_phase"].values()) >= 1
    assert killed["micro-batches trained"] - killed["replayed from records"] <= calm["micro-batches trained"]
