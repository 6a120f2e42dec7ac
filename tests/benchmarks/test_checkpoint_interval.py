"""The benchmark of checkpoints every so many iterations, small."""

import pytest

from benchmarks import checkpoint_interval
from benchmarks.checkpoint_interval import CHECKPOINT_MIB, run, targets_of


@pytest.mark.slow
def test_the_bytes_fall_with_the_interval_and_the_replays_are_counted(tmp_path, monkeypatch):
    monkeypatch.setitem(checkpoint_interval.OPTIMIZER, "learning_rate", 1e-3)
    rows = run(tmp_path, (1, 2), 4, hidden=64, layers=1, prompts=2)
    assert [row["replayed iterations"] for row in rows] == [0, 2]
    assert rows[0][CHECKPOINT_MIB] == pytest.approx(2 * rows[1][CHECKPOINT_MIB])
    assert rows[0]["weights, MiB per iteration"] == pytest.approx(rows[1]["weights, MiB per iteration"])
    assert [target.met for target in targets_of(rows)] == [True]
    rows[1][CHECKPOINT_MIB] *= 1.1
    assert [target.met for target in targets_of(rows)] == [False]
