import itertools
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.sharing.admission_forecast import (
    COPIED_BYTES_PER_S,
    Choice,
    choices,
    estimated_slowdowns,
    predict_slowdowns,
    simulate_until_sure,
    sure_slowdowns,
)
from tasks.sharing.seat_placement import HostRoom
from tasks.sharing.shared_cycles import Conditions
from tests.fleet_records import a_run
from tests.property_examples import part_of_examples

SMALL, HALF = {"phase_s": 10.0, "cycle_s": 200.0}, {"phase_s": 100.0, "cycle_s": 200.0}


def room(name, *seated, memory_bytes=100):
    return HostRoom(host=name, memory_bytes=memory_bytes, seated=seated)


def test_the_host_that_slows_its_runs_down_least_is_first():
    rooms = [room("busy", a_run("a", **HALF)), room("calm", a_run("b", **SMALL)), room("empty")]
    found = choices(a_run("new", **SMALL), rooms, 1.1, 1.0)
    assert [choice.host for choice in found] == ["empty", "calm", "busy"]
    assert found[0].slowdowns == {a_run("new").id: pytest.approx(1.0)}
    assert found[1].slowdowns.keys() == {a_run("b").id, a_run("new").id}
    assert found[0].worst < found[1].worst < found[2].worst


def test_a_host_whose_memory_does_not_hold_all_states_is_no_choice():
    rooms = [room("full", a_run("a", state_bytes=60)), room("roomy", a_run("b", state_bytes=40))]
    assert [choice.host for choice in choices(a_run("new", state_bytes=50), rooms, 1.1, 0.0)] == ["roomy"]


def test_a_switch_that_was_not_measured_takes_as_long_as_the_largest_state():
    size = int(10 * COPIED_BYTES_PER_S)
    rooms = [room("h", a_run("a", state_bytes=size), memory_bytes=2 * size)]
    [estimated] = choices(a_run("new"), rooms, 1.1, None)
    [given_s] = choices(a_run("new"), rooms, 1.1, 20.0)
    [measured] = choices(a_run("new"), rooms, 1.1, 0.1)
    assert estimated == given_s
    assert estimated.worst > measured.worst


def test_those_that_would_be_too_slow_are_named_with_the_slowest_first():
    choice = Choice(host="h", slowdowns={"a": 1.2, "b": 1.05, "c": 1.4, "d": 1.1})
    assert choice.beyond(1.1) == ["c", "a"]
    assert choice.beyond(1.4) == []


@settings(max_examples=part_of_examples(0.2))
@given(st.permutations(range(4)))
def test_the_order_of_runs_does_not_change_a_prediction(order):
    runs = [a_run(str(each), phase_s=10.0 * (each + 1), cycle_s=150.0) for each in range(4)]
    given_s = Conditions(switch_s=2.0)
    assert predict_slowdowns([runs[each] for each in order], given_s) == predict_slowdowns(runs, given_s)


@pytest.mark.parametrize("ahead", [0, 1])
def test_more_runs_are_slower_in_the_mean(ahead):
    means = []
    for count in range(1, 6):
        runs = [a_run(str(each), phase_s=30.0, cycle_s=150.0, rollouts_ahead=ahead) for each in range(count)]
        means.append(sum(predict_slowdowns(runs, Conditions(switch_s=5.0)).values()) / count)
    # Two runs one step off hide their waits, and may make up for those of before they settled.
    assert all(later > sooner - 1e-3 for sooner, later in itertools.pairwise(means))
    assert means[0] == pytest.approx(1.0)
    assert means[-1] > 1.05


def simulated(runs, conditions):
    how = {"iterations": 200, "seeds": range(6), "step": 6, "unsure_max": 0.0}
    return {run.id: fmean(found) for run, found in zip(runs, simulate_until_sure(runs, conditions, **how), strict=True)}


def test_a_run_alone_waits_for_nothing_whatever_its_cycle():
    for run in (a_run("a"), a_run("a", phase_s=40.0, cycle_s=30.0, rollouts_ahead=1)):
        assert estimated_slowdowns([run], Conditions(switch_s=9.0)) == {run.id: 1.0}


def test_the_closed_form_is_near_simulations_where_runs_begin_at_random():
    runs = [a_run(name, phase_s=phase_s, cycle_s=300.0) for name, phase_s in (("a", 30.0), ("b", 60.0), ("c", 40.0))]
    conditions = Conditions(switch_s=2.0)
    found, long = estimated_slowdowns(runs, conditions), simulated(runs, conditions)
    assert [found[run.id] - 1 for run in runs] == pytest.approx([long[run.id] - 1 for run in runs], rel=0.3)


@pytest.mark.parametrize(
    ("load", "slowdown_max", "is_sure"),
    [(0.1, 1.1, True), (0.35, 1.1, False), (0.6, 1.1, True), (0.35, 2.0, True), (0.45, 2.0, False)],
)
def test_the_closed_form_answers_where_a_host_keeps_up_or_does_not_for_sure(load, slowdown_max, is_sure):
    runs = [a_run(str(each), phase_s=load * 300.0, cycle_s=300.0) for each in range(2)]
    conditions = Conditions(switch_s=2.0, slowdown_max=slowdown_max)
    found = sure_slowdowns(runs, conditions)
    assert (found is not None) == is_sure
    fits = max(simulated(runs, conditions).values()) <= slowdown_max
    assert (max(predict_slowdowns(runs, conditions).values()) <= slowdown_max) == fits


def test_a_rare_long_phase_before_a_run_ahead_is_simulated_although_it_hides_the_mean_wait():
    long, short = a_run("long", phase_s=350.0, cycle_s=900.0), a_run("short", cycle_s=120.0, rollouts_ahead=1)
    conditions = Conditions(switch_s=2.0)
    assert max(estimated_slowdowns([long, short], conditions).values()) < 1.06
    assert sure_slowdowns([long, short], conditions) is None
    assert predict_slowdowns([long, short], conditions)[short.id] > 1.1


def test_a_run_ahead_whose_times_vary_is_simulated_although_mean_times_hide_the_wait():
    ahead = a_run("ahead", phase_s=80.0, cycle_s=290.0, rollouts_ahead=1, rollout_cv=1.0)
    other = a_run("other", phase_s=160.0, cycle_s=570.0, rollouts_ahead=1, rollout_cv=0.0, phase_cv=2.0)
    conditions = Conditions(switch_s=10.0, slowdown_max=1.05)
    assert estimated_slowdowns([ahead, other], conditions)[ahead.id] == 1.0
    assert sure_slowdowns([ahead, other], conditions) is None
    assert predict_slowdowns([ahead, other], conditions)[ahead.id] > 1.05
    steady = replace(ahead, rollout_cv=0.1), replace(other, phase_cv=0.1)
    assert sure_slowdowns(steady, conditions) is None
    assert sure_slowdowns([replace(run, phase_s=run.phase_s / 2) for run in steady], conditions) is not None


def test_hosts_whose_simulations_differ_are_simulated_until_the_mean_is_sure():
    calm = [a_run(str(each), phase_s=10.0, cycle_s=200.0) for each in range(2)]
    unlike = [
        a_run("long", phase_s=250.0, cycle_s=1000.0, rollouts_ahead=1, share=2.0),
        a_run("short", phase_s=24.0, cycle_s=120.0, rollouts_ahead=1),
        a_run("longer", phase_s=500.0, cycle_s=1100.0, rollouts_ahead=1),
    ]
    how = {"iterations": 40, "seeds": range(30), "step": 6}
    assert [len(each) for each in simulate_until_sure(calm, Conditions(switch_s=1.0), unsure_max=0.01, **how)] == [6, 6]
    found = simulate_until_sure(unlike, Conditions(switch_s=10.0), unsure_max=0.015, **how)
    slowest = max(found, key=fmean)
    assert 6 < len(slowest) <= 30
    assert stdev(slowest) / len(slowest) ** 0.5 <= 0.015 or len(slowest) == 30
    assert len(simulate_until_sure(unlike, Conditions(switch_s=10.0), unsure_max=0.0, **how)[0]) == 30
