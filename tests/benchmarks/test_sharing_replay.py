"""The replay of arrivals: cases by hand for each policy, and what counts as the published order."""

import itertools
import json
import math

import pytest

from benchmarks import sharing_replay
from benchmarks.sharing_replay import POLICIES, Arrival, Outcome, Policy, Replay, draw, report, slowdown

SPREAD, BACKFILL = POLICIES[2], POLICIES[3]


def arrival(at_h, hours, trainers=1, train_share=0.3):
    return Arrival(at_h=at_h, hours=hours, train_share=train_share, trainers=trainers)


@pytest.fixture(autouse=True)
def two_pools(monkeypatch):
    monkeypatch.setattr(sharing_replay, "POOLS", 2)


def began(policy, *arrivals):
    outcome = Replay(arrivals, policy).run()
    assert outcome.began_h.keys() == outcome.ended_h.keys() == set(range(len(arrivals)))
    return [round(outcome.began_h[number], 6) for number in range(len(arrivals))]


def test_isolated_runs_wait_for_a_pool_of_their_own():
    assert began(POLICIES[0], arrival(0.0, 5.0), arrival(0.0, 7.0), arrival(1.0, 1.0)) == [0.0, 0.0, 5.0]


def test_two_runs_on_a_pool_take_longer_and_a_third_waits():
    runs = [arrival(0.0, 10.0) for _ in range(4)]
    outcome = Replay([*runs, arrival(0.0, 1.0)], SPREAD).run()
    both = slowdown(0.3, 0.3)
    assert 1.0 < both < 1.3
    assert outcome.ended_h[0] == pytest.approx(10 * both)
    assert outcome.began_h[4] == pytest.approx(10 * both)
    assert outcome.wait_most_h == pytest.approx(10 * both)


def test_packed_runs_share_a_pool_and_spread_ones_do_not():
    runs = [arrival(0.0, 10.0), arrival(0.0, 10.0)]
    packed, spread = (Replay(runs, policy).run() for policy in (POLICIES[1], SPREAD))
    assert packed.slowdown == pytest.approx(slowdown(0.3, 0.3))
    assert spread.slowdown == pytest.approx(1.0)


def test_a_run_that_fits_passes_one_that_does_not_for_as_long_as_that_is_patient():
    """The second run needs both pools. Each of the others would fit beside the first."""
    runs = [arrival(0.0, 10.0, train_share=0.45), arrival(1.0, 10.0, 2, 0.5), *(arrival(h, 9.0) for h in (2.0, 5.0))]
    assert began(BACKFILL, *runs)[2:] == [2.0, 5.0]
    patient = Policy(name="", runs_max=2, patience_h=2.0)
    assert began(patient, *runs)[2] == 2.0
    assert began(patient, *runs)[3] >= 10.0
    assert min(began(SPREAD, *runs)[2:]) >= 10.0


def test_a_run_whose_patience_ends_while_nothing_else_happens_changes_nothing():
    patient = Policy(name="", runs_max=1, patience_h=0.5)
    assert began(patient, arrival(0.0, 10.0, 2), arrival(1.0, 1.0)) == [0.0, 10.0]


def test_draws_are_the_same_each_time_and_come_in_bursts():
    found = draw(3, 2.2)
    assert draw(3, 2.2) == found != draw(4, 2.2)
    gaps = [later.at_h - sooner.at_h for sooner, later in itertools.pairwise(found)]
    assert all(gap > 0 for gap in gaps)
    assert sum(gap < 0.01 for gap in gaps) > len(gaps) / 2
    assert math.isclose(found[-1].at_h / len(found), 2.2, rel_tol=0.5)


def test_another_order_than_the_published_one_is_missed(capsys):
    def outcome(hours):
        return Outcome([arrival(0.0, 1.0)], {0: 0.0}, {0: hours})

    for hours, met in (((9.0, 7.0, 6.0, 5.0, 5.5), True), ((9.0, 6.0, 7.0, 5.0, 5.5), False)):
        found = {policy.name: outcome(each) for policy, each in zip(POLICIES, hours, strict=True)}
        report({2.2: [found]}, as_json=True)
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [target["met"] for target in summary["targets"].values()] == [met]
