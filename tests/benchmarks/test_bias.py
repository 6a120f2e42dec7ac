import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bias import LENGTH_MAX, POLICIES, R1_LENGTHS, biases, estimate, seen, stated_responses
from benchmarks.interruption import Circumstances, draw_losses, trained_on

FREE = Circumstances(cold_start=0.0, takeover=0.0, flush_interval=1e-9)
SLOW = Circumstances(cold_start=1.0, takeover=0.5, flush_interval=2.0)


def column(policy, durations, losses, given=SLOW):
    return trained_on(policy, np.array([durations], float), [0], [losses], given)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_not_struck_is_trained_on(policy):
    assert column(policy, [4.0, 9.0], [5.0]) == 0


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("drop response", -1),
        ("drop group", -1),
        ("restart, sampled anew", 1),
        ("restart, same tokens", 0),
        ("resume", 0),
    ],
)
def test_who_is_struck_once(policy, expected):
    assert column(policy, [4.0, 2.0], [3.0]) == expected


def test_times_of_restart_and_resumption_worked_out_by_hand():
    # Struck at 3 of 4: restart ends at 3 + 1 + 4; resumption keeps the 2 that were flushed and ends at 3 + 1 + 0.5 + 2.
    for policy, end in (("restart, same tokens", 8.0), ("resume", 6.5)):
        for deadline, expected in ((end, 0), (end - 0.01, -1)):
            limited = Circumstances(cold_start=1.0, takeover=0.5, flush_interval=2.0, deadline=deadline)
            assert column(policy, [4.0], [3.0], limited) == expected


def test_nobody_is_lost_while_the_successor_starts():
    assert column("restart, sampled anew", [4.0, 2.0, 1.0], [3.0, 3.5]) == 1
    assert column("restart, sampled anew", [4.0, 2.0, 1.0], [3.0, 4.5]) == 2


def test_attempts_begin_again_with_the_first_sample():
    assert column("restart, sampled anew", [3.0, 3.0], [1.0, 3.0], FREE) == 0


def test_a_dropped_group_is_dropped_whole_and_alone():
    durations = np.array([[1.0], [9.0], [1.0], [1.0]])
    assert trained_on("drop response", durations, [0, 0, 1, 1], [[5.0], [5.0]], SLOW).tolist() == [0, -1, 0, 0]
    assert trained_on("drop group", durations, [0, 0, 1, 1], [[5.0], [5.0]], SLOW).tolist() == [-1, -1, 0, 0]


@pytest.mark.slow
def test_survival_falls_exponentially_with_duration():
    rng = np.random.default_rng(0)
    durations = np.repeat([[0.5], [1.0], [2.0]], 4000, axis=0)
    losses = draw_losses(rng, len(durations), 0.7, until=8.0)
    kept = trained_on("drop response", durations, range(len(durations)), losses, FREE).reshape(3, -1) >= 0
    assert kept.mean(axis=1) == pytest.approx(np.exp([-0.35, -0.7, -1.4]), abs=0.03)


@given(seed=st.integers(0, 10_000), rate=st.floats(0.0, 3.0))
def test_whoever_waits_trains_on_everything_that_is_resumed_or_restarted_alike(seed: int, rate: float):
    rng = np.random.default_rng(seed)
    losses = draw_losses(rng, 3, rate, until=40.0)
    durations = rng.uniform(0.01, 1.0, (30, 2))
    for policy in ("restart, same tokens", "resume"):
        assert set(trained_on(policy, durations, range(30), losses, FREE)) == {0}
    assert set(trained_on("restart, sampled anew", durations, range(30), losses, FREE)) <= {0, 1}


def test_stated_lengths_have_the_table_s_quantiles_and_a_reward_that_falls():
    responses = stated_responses(np.random.default_rng(0), 3000, 2)
    lengths = responses.lengths[:, 0]
    assert np.quantile(lengths, 0.5) == pytest.approx(792, rel=0.06)
    assert np.quantile(lengths, 0.9) == pytest.approx(3432, rel=0.1)
    assert lengths.max() <= LENGTH_MAX == R1_LENGTHS[-1][1]
    assert responses.rewards.mean() == pytest.approx(0.6, abs=0.02)
    assert np.corrcoef(lengths, responses.rewards[:, 0])[0, 1] < -0.15
    groups = lengths.reshape(3000, 8)
    assert np.corrcoef(groups[:, 0], groups[:, 1])[0, 1] > 0.2


def test_bias_of_each_policy_has_the_sign_it_must_have():
    rng = np.random.default_rng(4)
    rows = biases("stated", [stated_responses(rng, 64, 3) for _ in range(12)], seed=5)
    found = {row["policy"]: row for row in rows if row["losses/h"] == 4.0}
    for policy in ("drop response", "drop group", "restart, sampled anew"):
        assert found[policy]["length ratio"].mean < 1.0
    assert found["drop group"]["trained"] < found["drop response"]["trained"] < 1.0
    assert found["drop response"]["reward bias"].mean > 0
    for policy in ("restart, same tokens", "resume"):
        assert (found[policy]["length ratio"].mean, found[policy]["reward bias"].mean) == (1.0, 0.0)
    restarted, resumed = (found[policy]["trained, deadline"] for policy in ("restart, same tokens", "resume"))
    assert restarted < resumed <= 1.0


def test_nothing_left_to_train_on_is_an_error():
    responses = stated_responses(np.random.default_rng(0), 2, 1)
    with pytest.raises(ValueError, match="drop response: nothing of 16 responses"):
        seen("drop response", responses, [[1e-9]], math.inf)


def test_estimate():
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.half_width) == (2.0, pytest.approx(1.96 / math.sqrt(3)))
    assert str(found) == "2.000 ± 1.132"
