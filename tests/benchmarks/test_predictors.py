"""The yardstick of the predictors' benchmark, on lengths whose best prediction is known."""

import numpy as np
import pytest

from benchmarks.predictors import NEWEST, ORACLE, Recorded, walk
from storage.records.prompt_table import PromptRow
from tasks.planning.prompt_features import prompt_features

SIZE = 20


def recorded(seed: int, noise: float) -> Recorded:
    """The same prompts every time, in another order, whose mean lengths their tokens do not show."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(SIZE)
    rows = [PromptRow(f"p{k}", (1, 2), "", {}) for k in order]
    lengths = 10.0 * (order[:, None] + 1) + noise * rng.normal(size=(SIZE, 4))
    return Recorded(prompts=prompt_features(rows), lengths=lengths, length_max=500)


def test_history_finds_what_recurs_and_what_was_seen_first_is_not_counted_as_seen():
    walked = walk([recorded(seed, 0.1) for seed in range(4)])
    assert walked.seen == [0, 1, 1, 1]
    for name in ("history", NEWEST, ORACLE):
        assert walked.mean(name, "recall", again=True) == 1
    assert walked.mean("none", "recall", again=True) == pytest.approx(0.2)
    assert walked.mean("ranker", "recall", again=True) < 0.5
    assert walked.mean("none", "recall", again=False) == pytest.approx(0.2)
    assert np.isnan(walked.mean("history", "recall", again=False))
