"""The simulator of shared trainers against a judge that knows the rules, cases by hand, and the bound on any saving."""

import importlib.util
import itertools
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.sharing import shared_cycles
from tasks.sharing.shared_cycles import Conditions, Helping, saving, saving_bound, share_trainer
from tests.fleet_records import a_run

STEADY = Conditions(switch_s=2.0, rollout_cv=0.0, phase_cv=0.0)
TOGETHER = Conditions(switch_s=2.0, rollout_cv=0.0, phase_cv=0.0, together=True)
PROFILES = st.lists(
    st.tuples(st.floats(1.0, 300.0), st.floats(0.05, 1.0), st.integers(0, 1), st.floats(0.2, 5.0)),
    min_size=1,
    max_size=5,
)
CONDITIONS = st.builds(
    Conditions,
    switch_s=st.floats(0.0, 60.0),
    slowdown_max=st.floats(1.01, 2.0),
    rollout_cv=st.floats(0.0, 1.0),
    phase_cv=st.floats(0.0, 0.5),
    correlation=st.floats(0.0, 1.0),
    together=st.booleans(),
)


def drawn(profiles):
    return [
        a_run(str(number), phase_s=phase_s, cycle_s=phase_s / load, rollouts_ahead=ahead, share=share)
        for number, (phase_s, load, ahead, share) in enumerate(profiles)
        for load in [max(load, 0.02)]
    ]


def like_runs(count, *, train_share=0.2, cycle_s=600.0, ahead=0):
    return [
        a_run(str(each), phase_s=train_share * cycle_s, cycle_s=cycle_s, rollouts_ahead=ahead) for each in range(count)
    ]


def complaints(runs, conditions, got):
    """What is wrong with a simulation without variation, found from its entries and the records of the runs alone."""
    by_id = {run.id: run for run in runs}
    rolled = {run.run: run.began_s for run in got.runs}
    ended = {run: [] for run in by_id}
    resident, free_s, switched = None, 0.0, None
    for entry in got.entries:
        if entry.began_s != free_s:
            yield f"entry {entry} does not begin at {free_s}"
        free_s = entry.ended_s
        if entry.kind == "switch":
            switched = entry
        if entry.kind != "train":
            continue
        run, done = by_id[entry.run], ended[entry.run]
        before = len(done) - 1 - run.rollouts_ahead
        rollout_s = run.cycle_s if run.rollouts_ahead else run.cycle_s - run.phase_s
        rolled[run.id] = max(rolled[run.id], done[before] if before >= 0 else 0.0) + rollout_s
        due_s = max(rolled[run.id], done[-1] if done else 0.0)
        ordered_s = entry.began_s if switched is None else switched.began_s
        if entry.iteration != len(done) or ordered_s < due_s - 1e-6:
            yield f"{entry} begins at {ordered_s} and is due at {due_s}"
        if not math.isclose(entry.seconds, run.phase_s, rel_tol=1e-9):
            yield f"{entry} lasts {entry.seconds}, not {run.phase_s}"
        if (switched is not None) != (resident not in (None, run.id)):
            yield f"{entry}: switch {switched} with {resident} on the device"
        if switched is not None and not math.isclose(switched.seconds, conditions.switch_s, abs_tol=1e-6):
            yield f"{switched} does not last {conditions.switch_s}"
        resident, switched = run.id, None
        done.append(entry.ended_s)
    yield from wrong_slowdowns(by_id, ended, got)


def wrong_slowdowns(by_id, ended, got):
    for found in got.runs:
        run = by_id[found.run]
        alone_s = len(ended[run.id]) * run.cycle_s + (run.phase_s if run.rollouts_ahead else 0.0)
        if not math.isclose(found.slowdown, (ended[run.id][-1] - found.began_s) / alone_s, rel_tol=1e-9):
            yield f"slowdown {found.slowdown} of {run.id}"


@given(profiles=PROFILES, switch_s=st.floats(0.1, 60.0), seed=st.integers(0, 99))
def test_a_simulation_without_variation_keeps_every_rule(profiles, switch_s, seed):
    runs = drawn(profiles)
    conditions = Conditions(switch_s=switch_s, rollout_cv=0.0, phase_cv=0.0)
    got = share_trainer(runs, conditions, iterations=3, seed=seed)
    assert list(complaints(runs, conditions, got)) == []


PLANTED = {
    "trains two at once": ("now_s = until_s", "now_s = until_s - (10.0 if kind == 'train' else 0.0)"),
    "forgets the switch": ("now_s + given.switch_s", "now_s"),
    "switches without a change": ("if resident not in (None, chosen.id):", "if True:"),
    "begins before a phase is due": ("(due_s := min(", "(due_s := 0.5 * min("),
    "rolls out too far ahead": ("- 1 - self.ahead", "- 2 - self.ahead"),
    "takes the phase for a part of the rollout": ("run.cycle_s - run.phase_s)", "run.cycle_s)"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_the_judge_finds_errors_that_are_put_in_on_purpose(planted, tmp_path):
    right, wrong = PLANTED[planted]
    source = Path(shared_cycles.__file__).read_text()
    assert source.count(right) == 1
    file = tmp_path / "planted.py"
    file.write_text(source.replace(right, wrong))
    broken = _loaded(file)
    runs = [*like_runs(1), a_run("ahead", phase_s=340.0, cycle_s=400.0, rollouts_ahead=1)]
    try:
        got = broken.share_trainer(runs, STEADY, iterations=10, seed=1)
    except AssertionError:
        # The simulator's own check has found it.
        return
    assert list(complaints(runs, STEADY, got))


def _loaded(file):
    spec = importlib.util.spec_from_file_location("planted", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted"] = module
    spec.loader.exec_module(module)
    return module


def test_two_runs_that_begin_together_by_hand():
    """Both are due at 20; the first trains until 30, the second until 42. From then on they are out of step."""
    got = share_trainer([a_run("a"), a_run("b")], TOGETHER, iterations=2, seed=0)
    assert [(each.kind, each.began_s, each.ended_s) for each in got.entries] == [
        ("idle", 0.0, 20.0),
        ("train", 20.0, 30.0),
        ("switch", 30.0, 32.0),
        ("train", 32.0, 42.0),
        ("idle", 42.0, 50.0),
        ("switch", 50.0, 52.0),
        ("train", 52.0, 62.0),
        ("switch", 62.0, 64.0),
        ("train", 64.0, 74.0),
    ]
    first, second = sorted(got.runs, key=lambda run: run.ended_s)
    assert (first.waited_s, second.waited_s) == ((0.0, 0.0), (10.0, 0.0))
    assert (first.slowdown, second.slowdown) == pytest.approx((62 / 60, 74 / 60))
    assert (got.part("train"), got.part("switch"), got.part("idle")) == pytest.approx((40 / 74, 6 / 74, 28 / 74))


@given(profiles=PROFILES, conditions=CONDITIONS, seed=st.integers(0, 99), gpus=st.tuples(*[st.floats(0.1, 99.0)] * 2))
def test_no_saving_exceeds_the_bound_and_no_run_is_faster_than_alone(profiles, conditions, seed, gpus):
    got = share_trainer(drawn(profiles), conditions, iterations=5, seed=seed)
    count = len(profiles)
    assert min(run.slowdown for run in got.runs) >= 1 - 1e-9
    assert saving(got.slowdown_mean, count, *gpus) <= saving_bound(count, *gpus) + 1e-9
    assert all(wait_s >= 0 for run in got.runs for wait_s in run.waited_s)
    parts = [got.part(kind) for kind in ("train", "switch", "idle")]
    assert math.isclose(sum(parts), 1.0, abs_tol=1e-9)


@given(profiles=PROFILES, conditions=CONDITIONS, seed=st.integers(0, 99))
def test_the_same_seed_gives_the_same_simulation_in_whatever_order_runs_are_given(profiles, conditions, seed):
    runs = drawn(profiles)
    got = share_trainer(runs, conditions, iterations=3, seed=seed)
    again = share_trainer(runs[::-1], conditions, iterations=3, seed=seed)
    assert (again.runs[::-1], again.entries) == (got.runs, got.entries)


@pytest.mark.parametrize("train_share", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("switch_s", [0.0, 20.0])
def test_two_like_runs_one_step_off_come_within_a_point_of_the_bound(train_share, switch_s):
    runs = like_runs(2, train_share=train_share, ahead=1)
    got = share_trainer(runs, Conditions(switch_s=switch_s), iterations=200, seed=3)
    for gpus in ((1.0, 1.0), (1.0, 2.0), (1.0, 4.0)):
        assert saving_bound(2, *gpus) - saving(got.slowdown_mean, 2, *gpus) < 0.01


def test_a_run_alone_is_not_slowed_down():
    alone = share_trainer(like_runs(1), Conditions(switch_s=100.0), iterations=20, seed=1)
    assert alone.slowdown_mean == pytest.approx(1.0)
    assert alone.part("switch") == 0.0


def test_an_overloaded_trainer_slows_runs_down_to_what_it_can_do():
    """Six phases of 0.4 of a cycle need 2.4 cycles."""
    got = share_trainer(like_runs(6, train_share=0.4), Conditions(switch_s=0.0), iterations=100, seed=1)
    assert got.slowdown_mean == pytest.approx(2.4, rel=0.03)
    assert got.part("train") > 0.95


def test_iterations_before_a_host_has_settled_do_not_count():
    """Six phases of 0.4 of a cycle need 2.4 cycles; the first ones find an idle trainer."""
    runs, given = like_runs(6, train_share=0.4), Conditions(switch_s=0.0)
    everything = share_trainer(runs, given, iterations=8, seed=1)
    settled = share_trainer(runs, given, iterations=8, seed=1, settled=20)
    assert settled.slowdown_mean == pytest.approx(2.4, rel=0.1)
    assert abs(settled.slowdown_mean - 2.4) < abs(everything.slowdown_mean - 2.4)
    assert {len(run.waited_s) >= 8 for run in settled.runs} == {True}


def test_runs_begin_to_count_at_one_moment_and_change_nothing_of_what_happens():
    """A run with short cycles has trained more often by then, and a host has settled only when all have."""
    runs = [*like_runs(2, train_share=0.5), a_run("short", phase_s=30.0, cycle_s=100.0)]
    given = Conditions(switch_s=5.0)
    settled = share_trainer(runs, given, iterations=8, seed=1, settled=20)
    everything = share_trainer(runs, given, iterations=40, seed=1)
    ended_s = [
        [entry.ended_s for entry in everything.entries if entry.kind == "train" and entry.run == run.id] for run in runs
    ]
    first = [ended.index(run.began_s) + 1 for ended, run in zip(ended_s, settled.runs, strict=True)]
    assert min(first) == 20
    assert first[2] > 30
    for number, late, whole in zip(first, settled.runs, everything.runs, strict=True):
        assert late.waited_s == whole.waited_s[number:][: len(late.waited_s)]


def test_rollouts_that_are_long_together_keep_phases_apart():
    """Runs that wait for each other once are out of step, and stay so if their rollouts vary alike."""
    mean = {
        correlation: share_trainer(
            like_runs(3), Conditions(switch_s=0.0, correlation=correlation), iterations=300, seed=2
        )
        for correlation in (0.0, 1.0)
    }
    assert mean[1.0].slowdown_mean < mean[0.0].slowdown_mean


def test_the_bound_by_hand():
    assert saving_bound(2, 1.0, 1.0) == 0.25
    assert saving_bound(1, 1.0, 1.0) == 0.0
    assert saving(1.0, 2, 24.0, 96.0) == pytest.approx(saving_bound(2, 24.0, 96.0)) == pytest.approx(0.4)
    assert saving(2.0, 2, 1.0, 1.0) == -0.5


@pytest.mark.parametrize("runs", [[], [a_run("a"), a_run("a")]])
def test_runs_are_needed_and_named_once(runs):
    with pytest.raises(ValueError, match="allowed: at least one, each id once"):
        share_trainer(runs, STEADY, iterations=1, seed=0)


def test_a_member_fills_idle_time_and_the_time_stays_without_gaps():
    runs = [a_run(name, cycle_s=600.0, phase_s=100.0, rollout_gpus=2, trainer_gpus=2) for name in "ab"]
    helped = Conditions(switch_s=2.0, helping=Helping(quiet_s=60.0, start_s=20.0))
    found = share_trainer(runs, helped, iterations=30, seed=1)
    assert all(before.ended_s == after.began_s for before, after in itertools.pairwise(found.entries))
    assert {"backfill", "train"} <= {entry.kind for entry in found.entries}
    plain = share_trainer(runs, Conditions(switch_s=2.0), iterations=30, seed=1)
    assert found.slowdown_mean < plain.slowdown_mean
    assert found.part("idle") < plain.part("idle")
    # Both generate with twice the machines for seven tenths of the time at best.
    assert found.slowdown_mean > plain.slowdown_mean * (1 - 0.7 / 2)


def test_a_member_needs_to_know_the_runs_gpus():
    helped = Conditions(switch_s=0.0, helping=Helping(quiet_s=1, start_s=1))
    with pytest.raises(ValueError, match=r"rollout_gpus: value 0; allowed where a member helps: 1 or more"):
        share_trainer([a_run("a")], helped, iterations=1, seed=0)
