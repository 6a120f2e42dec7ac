"""Dollars by who cost them and by what they were for: both ways of counting come to the same."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.prices import RequestPrices
from storage.records.hints import CollectedRecord
from storage.records.records import TRAIN_POOL, ReportRecord, SlotLife, TrainingRecord
from tasks.reporting.costs import Rates, cost_metrics, crew_cost, life_time, trainer_time, usd_per_reward_point

LIFE = SlotLife(
    slot=0,
    incarnation="00000-a",
    pool="rollout",
    started_at_s=100.0,
    ended_at_s=200.0,
    state="gone",
    tokens_kept=60,
    tokens_recovered=0,
    tokens_regenerated=20,
    tokens_unused=20,
    working_at_s=110.0,
    decode_s=50.0,
    puts=10,
    gets=20,
    bytes_read=3_000_000_000,
)
TRAINING = TrainingRecord(
    iteration=0,
    weight_version=1,
    metrics={"timing_s/wait": 30.0, "requests/train_puts": 5.0, "requests/train_gets": 100.0},
    reward_errors=(),
    started_at_s=120.0,
    ended_at_s=220.0,
)
RATES = Rates(
    usd_per_h={"rollout": 3.6, TRAIN_POOL: 36.0, "control": 7.2},
    egress_usd_per_gb={"rollout": 0.02},
    requests=RequestPrices(put_usd=1e-3, get_usd=1e-4),
)
PURPOSES = [f"cost/usd_{name}" for name in ("useful", "wasted", "starting", "idle", "requests", "egress", "control")]
PARTIES = [f"cost/usd_{name}" for name in ("rollout", "train", "requests", "egress", "control")]


def metrics(lives, training=TRAINING, rates=RATES, control_s=5.0):
    return cost_metrics(lives, training, rates, tokens=60, planned_at_s=90.0, control_s=control_s)


def test_the_dollars_of_a_hand_made_iteration():
    found = metrics([LIFE])
    assert found["cost/usd_rollout"] == pytest.approx(0.1)
    assert found["cost/usd_train"] == pytest.approx(1.0)
    # The member: 30 s useful, 20 wasted, 10 starting, 40 idle; the trainer: 70 s useful, 30 idle.
    assert found["cost/usd_useful"] == pytest.approx(0.030 + 0.70)
    assert found["cost/usd_wasted"] == pytest.approx(0.020)
    assert found["cost/usd_starting"] == pytest.approx(0.010)
    assert found["cost/usd_idle"] == pytest.approx(0.040 + 0.30)
    assert found["cost/usd_requests"] == pytest.approx(15e-3 + 120e-4)
    assert found["cost/usd_egress"] == pytest.approx(0.06)
    assert found["cost/usd_control"] == pytest.approx(0.01)
    assert found["cost/usd_iter"] == pytest.approx(sum(found[name] for name in PURPOSES))
    assert found["cost/usd_per_mtok"] == pytest.approx(found["cost/usd_iter"] / 60 * 1e6)


def test_what_a_collector_took_and_asked_for_is_paid_for():
    collector = CollectedRecord(iteration=0, seconds=100.0, puts=7, gets=300)
    found, without = (
        cost_metrics([LIFE], TRAINING, RATES, tokens=60, planned_at_s=90.0, control_s=5.0, collected=each)
        for each in (collector, None)
    )
    assert found["cost/usd_requests"] - without["cost/usd_requests"] == pytest.approx(7e-3 + 300e-4)
    assert found["cost/usd_control"] - without["cost/usd_control"] == pytest.approx(0.2)
    assert found["cost/usd_iter"] - without["cost/usd_iter"] == pytest.approx(0.237)


def test_a_member_on_the_trainers_machine_is_paid_for_once():
    """It generated for 40 s before training began and for 10 s of it, as its record has it."""
    member = replace(
        LIFE, pool=TRAIN_POOL, started_at_s=80.0, working_at_s=90.0, ended_at_s=130.0, decode_s=40.0, tokens_kept=40
    )
    twin = replace(member, slot=1, incarnation="00001-a")
    assert crew_cost([member, twin], RATES.usd_per_h) == (0, 0)
    found = trainer_time([member, twin], TRAINING)
    assert found.total == pytest.approx(140.0)
    assert (found.starting, found.useful, found.wasted) == pytest.approx((10.0, 20.0 + 60.0, 20.0))
    assert found.idle == pytest.approx(30.0)
    assert metrics([member, twin])["cost/usd_train"] == pytest.approx(1.4)


def test_a_trainer_that_stands_is_paid_for_between_two_phases():
    stood = replace(TRAINING, metrics=TRAINING.metrics | {"timing_s/stood": 50.0})
    before, after = (metrics([LIFE], training) for training in (TRAINING, stood))
    assert after["cost/usd_idle"] - before["cost/usd_idle"] == pytest.approx(0.5)
    assert after["cost/usd_train"] - before["cost/usd_train"] == pytest.approx(0.5)
    assert after["timing_s/train"] == before["timing_s/train"]


def test_a_life_that_told_no_times_decoded_if_it_decoded_at_all():
    silent = replace(LIFE, working_at_s=None, decode_s=0.0)
    assert (life_time(silent).useful, life_time(silent).wasted) == pytest.approx((60.0, 40.0))
    nothing = replace(silent, tokens_kept=0, tokens_regenerated=0, tokens_unused=0)
    assert life_time(nothing).starting == 100.0
    assert trainer_time([LIFE], replace(TRAINING, metrics={})).useful == 100.0
    again = trainer_time([LIFE], replace(TRAINING, metrics={"timing_s/wait": 30.0, "timing_s/replay": 25.0}))
    assert (again.useful, again.wasted, again.idle) == (45.0, 25.0, 30.0)
    assert trainer_time([LIFE], replace(TRAINING, metrics={"timing_s/replay": 1e9})).wasted == 100.0


def test_machines_that_joined_cost_what_they_said():
    joined = replace(LIFE, pool="joined")
    assert crew_cost([joined], {}) == (100.0, 0.0)
    assert crew_cost([replace(joined, usd_per_hour=7.2)], {})[1] == pytest.approx(0.2)
    with pytest.raises(KeyError):
        crew_cost([replace(LIFE, pool="elsewhere")], RATES.usd_per_h)


SECONDS = st.floats(min_value=0, max_value=1e5)
COUNTS = st.integers(min_value=0, max_value=10**6)


@st.composite
def a_life(draw):
    return SlotLife(
        slot=draw(st.integers(0, 9)),
        incarnation="x",
        pool=draw(st.sampled_from(["rollout", "far", "joined", TRAIN_POOL])),
        started_at_s=(started_at_s := draw(SECONDS)),
        ended_at_s=started_at_s + draw(SECONDS),
        state=draw(st.sampled_from(["gone", "left", "lost"])),
        tokens_kept=draw(COUNTS),
        tokens_recovered=draw(COUNTS),
        tokens_regenerated=draw(COUNTS),
        tokens_unused=draw(COUNTS),
        usd_per_hour=draw(st.none() | st.floats(0, 100)),
        working_at_s=draw(st.none() | SECONDS),
        decode_s=draw(SECONDS),
        puts=draw(COUNTS),
        gets=draw(COUNTS),
        bytes_read=draw(st.integers(0, 10**12)),
    )


@pytest.mark.slow
@given(lives=st.lists(a_life(), min_size=1, max_size=8), start=SECONDS, took=SECONDS, wait=SECONDS, control=SECONDS)
def test_the_purposes_and_the_parties_add_up_to_the_same_total(lives, start, took, wait, control):
    training = replace(TRAINING, started_at_s=start, ended_at_s=start + took, metrics={"timing_s/wait": wait})
    rates = replace(RATES, usd_per_h={**RATES.usd_per_h, "far": 1.2}, egress_usd_per_gb={"far": 0.09})
    found = metrics(lives, training, rates, control)
    assert min(found[name] for name in (*PURPOSES, *PARTIES)) >= -1e-9
    for names in (PURPOSES, PARTIES):
        total = sum(found[name] for name in names)
        assert found["cost/usd_iter"] == pytest.approx(total, rel=1e-9, abs=1e-9)


@pytest.mark.slow
@given(lives=st.lists(a_life(), max_size=8), start=SECONDS, took=SECONDS, wait=SECONDS)
def test_the_trainers_bill_covers_its_training_and_no_second_twice(lives, start, took, wait):
    training = replace(TRAINING, started_at_s=start, ended_at_s=start + took, metrics={"timing_s/wait": wait})
    found = trainer_time(lives, training)
    before_s = [start - life.started_at_s for life in lives if life.pool == TRAIN_POOL]
    assert took - 1e-6 <= found.total <= took + max([0.0, *before_s]) + 1e-6
    assert min(found.useful, found.wasted, found.starting, found.idle) >= -1e-6


def report(iteration, **metrics_given):
    return ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=0,
        metrics={name.replace("usd", "cost/usd_iter"): value for name, value in metrics_given.items()},
        rewards=(),
        lengths=(),
        lives=(),
        train_started_at_s=0,
        train_ended_at_s=0,
        created_at_s=0,
    )


def test_dollars_per_point_of_reward_are_known_when_something_was_gained():
    first, second = report(0, reward=0.25, usd=1.0), report(1, reward=0.75, usd=2.0)
    assert usd_per_reward_point([first, second]) == 6.0
    assert usd_per_reward_point([first]) is None
    assert usd_per_reward_point([second, first]) is None
    assert usd_per_reward_point([]) is None
    assert usd_per_reward_point([report(0, usd=1.0), second]) is None
