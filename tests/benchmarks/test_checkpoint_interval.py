"""The benchmark of checkpoints every so many iterations, small."""

import pytest

from benchmarks import checkpoint_interval
from benchmarks.checkpoint_interval import CHECKPOINT_MIB, run, targets_of


@pytest.mark.slow
def test_the_bytes_fall_with_the_interval_and_the_replays_are_counted(tmp_path, monkeypatch):
    monkeypatch.setitem(checkpoint_interval.OPTIMIZER, "learning_rate", 1e-3)
    rows = run(tmp_path, (1, 2, "auto"), 4, hidden=64, layers=1, prompts=2)
    assert [row["replayed iterations"] for row in rows[:2]] == [0, 2]
    assert rows[2][CHECKPOINT_MIB] <= rows[0][CHECKPOINT_MIB] * 1.01
    assert rows[0][CHECKPOINT_MIB] == pytest.approx(2 * rows[1][CHECKPOINT_MIB])
    assert rows[0]["weights, MiB per iteration"] == pytest.approx(rows[1]["weights, MiB per iteration"])
    assert [target.met for target in targets_of(rows[:2])] == [True]
    rows[1][CHECKPOINT_MIB] *= 1.1
    assert [target.met for target in targets_of(rows[:2])] == [False]
    rows[2] |= {"publish, s per iteration": 9.0, "replay, s per iteration": 9.0}
    assert [target.met for target in targets_of(rows)] == [False, False]
