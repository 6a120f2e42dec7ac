"""The judge of dispatch finds the optimum of what can be worked out by hand, and says when a way misses it."""

import numpy as np
import pytest

from benchmarks.dispatch_optimum import WAYS, Instance, drawn, optimum_s, ratios, targets
from tasks.crew_model.step_time import StepTime
from tasks.planning.capacity import GroupLengths
from tasks.planning.makespan import DispatchMember


def test_the_optimum_of_a_sum_that_is_split_evenly():
    """One response at a time: 8 + 7 against 6 + 5 + 4, and longest first would take 8 + 5 + 4."""
    lengths = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
    alone = DispatchMember(pool="crew", step_time=StepTime(((1, 1.0),)), responses_max=1)
    instance = Instance(GroupLengths("known", lengths, lengths), 1, (alone, alone))
    assert optimum_s(instance) == 15.0
    assert WAYS["longest first, by exact times"](instance) == 17.0
    assert WAYS["dispatch"](instance) == 15.0


def test_dispatch_is_near_the_optimum_and_never_behind_exact_times():
    found = {name: ratios(way, range(40)) for name, way in WAYS.items()}
    assert [target.met for target in targets(found)] == [True, True]
    assert min(found["dispatch"]) > 0.5


@pytest.mark.parametrize("worse", ["longest first, by exact times", "longest first, by rates", "in turn"])
def test_a_worse_rule_in_its_place_is_said_to_miss(worse):
    found = {name: ratios(way, range(40)) for name, way in WAYS.items()}
    mean, _ = targets(found | {"dispatch": found[worse]})
    assert not mean.met


def test_instances_differ_and_are_repeatable():
    assert drawn(3).members == drawn(3).members
    assert len({len(drawn(seed).lengths) for seed in range(20)}) > 2
