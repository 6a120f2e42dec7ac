import numpy as np
import pytest

from tasks.forecasting.expectations import Expectations

PROMPTS = np.arange(100)
LENGTHS = np.random.default_rng(0).integers(10, 1000, (100, 4))
TAIL = set(np.argsort(-LENGTHS.mean(axis=1))[:20].tolist())


def tail_of(values: np.ndarray) -> set[int]:
    return set(np.argsort(-values)[:20].tolist())


def test_nothing_known_tells_all_groups_alike():
    told = Expectations("none", 0.9, 0).expected(0, PROMPTS, LENGTHS)
    assert told.predictor == "none"
    assert set(told.expected) == {LENGTHS.mean()}
    assert set(told.high) == {np.quantile(LENGTHS, 0.9)}


def test_the_oracle_tells_the_truth():
    told = Expectations("oracle", 0.0, 0).expected(0, PROMPTS, LENGTHS)
    assert (told.expected == LENGTHS.mean(axis=1)).all()
    assert (told.high >= told.expected).all()


@pytest.mark.parametrize("recall", [0.5, 0.7, 0.87, 1.0])
def test_so_much_of_the_tail_is_told_as_was_asked_for(recall):
    told = Expectations("recall", recall, 1).expected(0, PROMPTS, LENGTHS)
    assert len(tail_of(told.expected) & TAIL) / 20 == pytest.approx(recall, abs=0.051)
    assert (np.quantile(LENGTHS / told.high[:, None], 0.9) == pytest.approx(1)) or recall == 1
    assert sorted(told.expected) == sorted(LENGTHS.mean(axis=1))


def test_history_tells_the_epoch_before_and_of_new_prompts_the_average():
    history = Expectations("history", 0.9, 0)
    assert history.expected(0, PROMPTS, LENGTHS).predictor == "none"
    history.learn(PROMPTS, LENGTHS)
    told = history.expected(1, np.array([5, 999, 7]), LENGTHS[:3])
    assert told.predictor == "history"
    assert told.expected.tolist() == [LENGTHS[5].mean(), LENGTHS.mean(), LENGTHS[7].mean()]


def test_what_was_learned_fades_by_halves_as_in_production():
    told = Expectations("none", 0.9, 0)
    for scale in (1, 3, 3):
        told.learn(PROMPTS, scale * LENGTHS)
    # Half of it is the newest, a quarter the one before, and the rest the oldest.
    assert told.expected(3, PROMPTS, LENGTHS).expected[0] == pytest.approx((0.75 * 3 + 0.25) * LENGTHS.mean())
