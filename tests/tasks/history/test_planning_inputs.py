"""What the planner is told: by configuration, by the last reports, by the last plan."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.records import layout, records
from storage.records.planning_records import DecisionRecord, PoolObservation, SeedingRecord
from storage.records.records import TRAIN_POOL, ReportRecord, SlotLife, SlotPlan
from storage.records.run import read_plan
from storage.stores.memory import MemoryStore
from storage.stores.metered import MeteredStore
from tasks.configuration.run_config import parse
from tasks.crew_model.step_time import NOMINAL
from tasks.history.planning_inputs import REPORTS_READ, observed_step_time, planning_request, recent_reports
from tasks.planning.capacity import GroupLengths, TrainerCapacity
from tests.journals import a_plan

LENGTHS = GroupLengths("none", np.full(4, 100.0), np.full(4, 100.0))
OBSERVED = PoolObservation(
    pool="rollout", members=2.0, members_at_end=2, machine_s=7200.0, losses=1, start_s=30.0, step_s=((1, 0.01),)
)


def a_config(**sections):
    document = {
        "run": {"url": "memory://request", "num_prompts_per_step": 4, "num_generations": 3},
        "policy": {"path": "/nowhere"},
        "data": {"source": "arithmetic"},
        "rewards": [{"function": "arithmetic"}],
        "rollout": {"max_responses_in_flight": 16},
        "pools": {
            "rollout": {"count": 3, "usd_per_hour": 1.5},
            "more_rollout": {"zone-b": {"count": 5, "count_min": 0, "usd_per_hour": 0.5, "interruptible": False}},
            "train": {"usd_per_hour": 20.0},
        },
    }
    return parse(document | sections)


def a_life(slot, started_at_s, working_at_s, ended_at_s, pool="rollout"):
    return SlotLife(
        slot=slot,
        incarnation=f"{slot}",
        pool=pool,
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
        state="gone",
        tokens_kept=1,
        tokens_recovered=0,
        tokens_regenerated=0,
        working_at_s=working_at_s,
    )


def a_report(iteration, pools=(OBSERVED,), wait_s=20.0, **metrics):
    usd = {"cost/usd_iter": 2.0, "cost/usd_run": 2.0 * (iteration + 1)}
    return ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=0,
        metrics={"timing_s/train": 100.0, "timing_s/wait": wait_s, **usd, **metrics},
        rewards=(),
        lengths=(),
        lives=(a_life(0, 0, 10, 110), a_life(1, 5, 12, 90), a_life(2, 0, 5, 30, TRAIN_POOL)),
        train_started_at_s=50,
        train_ended_at_s=150,
        created_at_s=0,
        pools=pools,
    )


SLOTS = (
    SlotPlan(slot=0, pool="rollout", groups=(0,)),
    SlotPlan(slot=1, pool="zone-b", groups=(1,)),
    SlotPlan(slot=2, pool="zone-b", groups=(2,)),
    SlotPlan(slot=3, pool="zone-b", groups=()),
    SlotPlan(slot=4, pool=TRAIN_POOL, groups=(3,)),
)


def a_run(reports, planned=()):
    """A store with these reports, and plans of them and of `planned`, which are not concluded."""
    store = MeteredStore(MemoryStore())
    for report in reports:
        records.put(store, layout.report(report.iteration), report)
    for iteration in (*(report.iteration for report in reports), *planned):
        seeding = SeedingRecord(seeding_s=float(iteration), members=2)
        plan = replace(a_plan(4, 3, iteration=iteration, seeding=seeding), slots=SLOTS)
        records.put(store, layout.plan(iteration), plan)
    return store


def test_a_new_run_knows_its_pools_and_prices_alone():
    request = planning_request(MemoryStore(), a_config(), 0, LENGTHS)
    near, far = request.pools
    assert (near.name, near.count_min, near.count_max, near.usd_per_h) == (
        "rollout",
        1,
        3,
        1.5,
    )
    assert (far.name, far.count_min, far.count_max, far.usd_per_h) == ("zone-b", 0, 5, 0.5)
    assert (near.responses_max, near.measured, near.start_s, near.losses_per_h) == (16, False, 0.0, 0.0)
    assert (request.num_generations, request.keep_order, request.lengths) == (3, False, LENGTHS)
    assert (request.waits, request.seeding, request.width, request.train_s, request.spent_usd) == (
        None,
        None,
        (),
        None,
        0,
    )
    assert request.reserved == TrainerCapacity(engines=1, usd_per_h=20.0, responses_max=16)


def test_the_trainers_machines_are_offered_where_they_may_generate():
    config = a_config(planning={"seeding": "auto"}, trainer={"nnodes": 2, "nproc_per_node": 4})
    reserved = planning_request(MemoryStore(), config, 0, LENGTHS).reserved
    assert (reserved.engines, reserved.usd_per_h, reserved.responses_max) == (8, 40.0, 16)
    assert reserved.step_time is NOMINAL
    store = a_run([a_report(0, pools=(replace(OBSERVED, pool=TRAIN_POOL),))])
    assert planning_request(store, config, 1, LENGTHS).reserved.step_time.points == ((1, 0.01),)


def test_a_machine_that_was_started_came_later_after_its_plan():
    """Processes begin 10 s after the plan, and 200 s in the iteration for which machines had to be started."""
    reports = []
    for iteration, late_s in enumerate((200.0, 10.0, 12.0)):
        lives = tuple(a_life(slot, 1000.0 + late_s, 1300.0, 1400.0) for slot in range(3))
        report = replace(a_report(iteration), lives=lives, created_at_s=1500.0, train_ended_at_s=1480.0)
        reports.append(replace(report, metrics=report.metrics | {"timing_s/iteration": 500.0}))
    near, far = planning_request(a_run(reports), a_config(), 3, LENGTHS).pools
    assert (near.machine_start_s, near.machines_present, near.kept) == (190.0, 2, True)
    assert (far.machine_start_s, far.machines_present) == (0.0, None)


def test_the_longest_start_is_kept_by_the_plans_of_a_crew_that_stands():
    config = a_config(rollout={"crew": "standing"})
    reports = [a_report(0), a_report(1, pools=(replace(OBSERVED, start_s=2.0),))]
    request = planning_request(a_run(reports), config, 2, LENGTHS)
    assert request.crew == "standing"
    assert (request.pools[0].start_s, request.pools[0].cold_start_s) == (16.0, 30.0)

    store = a_run(reports)
    known = DecisionRecord(name="crew", chosen="standing", reason="", inputs={"rollout/start_s": 75.0})
    records.put(store, layout.plan(1), replace(read_plan(store, 1), decisions=(known,)))
    near, far = planning_request(store, config, 2, LENGTHS).pools
    assert (near.cold_start_s, far.cold_start_s) == (75.0, 0.0)


def a_timed_report(iteration, lengths=(5,) * 12, **metrics):
    """It took 70 s, and so long after it was concluded the next one."""
    report = replace(a_report(iteration, **metrics), lengths=lengths, created_at_s=100.0 * iteration)
    timed = replace(report, metrics=report.metrics | {"timing_s/iteration": 70.0})
    return replace(timed, train_ended_at_s=100.0 * iteration - 7.0)


def test_how_the_last_iterations_went_is_told():
    away = replace(OBSERVED, members_at_end=1)
    store = a_run([a_timed_report(0, pools=(away,)), a_timed_report(1, wait_s=40.0)])
    request = planning_request(store, a_config(), 2, LENGTHS)
    assert len(request.past_lengths) == 2
    assert (request.width, request.seeding.seeding_s) == ((("rollout", 1), ("zone-b", 2)), 1.0)
    assert (request.control_s, request.overlaps) == (7.0, False)
    silent = replace(a_timed_report(0), metrics={"timing_s/train": 5.0, "cost/usd_run": 0.0})
    assert planning_request(a_run([silent]), a_config(), 1, LENGTHS).past_lengths == ()
    ahead = a_config(algorithm={"max_staleness": 1})
    assert planning_request(store, ahead, 2, LENGTHS).overlaps
    assert planning_request(store, ahead, 2, LENGTHS).crew == "iteration"
    standing = a_config(rollout={"max_responses_in_flight": 16, "crew": "standing"})
    assert planning_request(store, standing, 2, LENGTHS).crew == "standing"


def test_the_lengths_of_the_last_iterations_are_told_as_so_many_groups():
    """Four groups of three are planned."""
    ended = [
        tuple(range(1, 13)),
        # One response without a reward: three groups are whole, and one of them stands for two.
        tuple(range(101, 112)),
        # Twice as many, one of them empty.
        (0, *range(202, 225)),
        # Not even one group.
        (7, 7),
    ]
    store = a_run([a_timed_report(iteration, lengths) for iteration, lengths in enumerate(ended)])
    twice, short, whole = planning_request(store, a_config(), 4, LENGTHS).past_lengths
    assert whole.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    assert short[:, 0].tolist() == [101, 104, 104, 107]
    assert twice[:, 0].tolist() == [1, 207, 216, 222]
    # Groups of another size say nothing of these.
    other = a_config(run={"url": "memory://request", "num_prompts_per_step": 4, "num_generations": 2})
    assert planning_request(store, other, 4, LENGTHS).past_lengths == ()


def test_dynamic_sampling_keeps_the_order():
    config = a_config(algorithm={"filter_groups": True})
    assert planning_request(MemoryStore(), config, 0, LENGTHS).keep_order


def test_what_the_last_iterations_showed_is_told():
    away = replace(OBSERVED, members=1.0, members_at_end=1, losses=3, start_s=50.0, step_s=((1, 0.04),))
    on_trainer = replace(OBSERVED, pool=TRAIN_POOL, members=9.0, members_at_end=9)
    store = a_run([a_report(0, pools=(away,)), a_report(1, (OBSERVED, on_trainer), wait_s=40.0)])
    request = planning_request(store, a_config(), 2, LENGTHS)
    near, far = request.pools
    assert near.step_time.points == ((1, pytest.approx((0.01 + 0.5 * 0.04) / 1.5)),)
    assert (near.start_s, near.losses_per_h, far.measured) == (40.0, 1.0, False)
    assert request.seeding == SeedingRecord(seeding_s=1.0, members=2)
    assert request.width == (("rollout", 1), ("zone-b", 2))
    assert request.train_s == 70.0
    waits = request.waits
    assert (waits.wait_train_s, waits.wait_remote_s, waits.train_s, waits.rollout_s) == (40.0, 40.0, 60.0, 100.0)
    assert waits.behind_s == 40.0
    # A crew that goes on does not wait.
    ahead = planning_request(store, a_config(algorithm={"max_staleness": 1}), 2, LENGTHS).waits
    assert (ahead.wait_remote_s, ahead.behind_s) == (0.0, 40.0)
    assert (waits.members, waits.members_at_end) == (2.0, 2)
    assert request.spent_usd == 4.0
    assert request.usd_no_machine == 0.0


def test_what_is_no_machines_costs_as_much_as_in_the_last_iteration():
    paid = {"cost/usd_requests": 0.5, "cost/usd_egress": 0.25, "cost/usd_control": 0.125, "cost/usd_train": 9.0}
    store = a_run([a_report(0), a_report(1, **paid)])
    assert planning_request(store, a_config(), 2, LENGTHS).usd_no_machine == 0.875
    assert planning_request(store, a_config(), 1, LENGTHS).usd_no_machine == 0.0


def test_without_the_trainers_word_nothing_is_known_of_waiting():
    report = replace(a_report(0), metrics={"timing_s/train": 5.0, "cost/usd_run": 0.0})
    request = planning_request(a_run([report]), a_config(), 1, LENGTHS)
    assert (request.waits, request.train_s) == (None, None)


def test_where_iterations_overlap_the_last_concluded_one_counts():
    last = a_report(3, **{"cost/usd_run": 50.0})
    store = a_run([*(a_report(k) for k in range(3)), last], planned=[4])
    request = planning_request(store, a_config(), 5, LENGTHS)
    assert request.seeding.seeding_s == 3.0
    assert request.spent_usd == 52.0  # the one between will cost what the last one did
    decisions = [
        DecisionRecord(name=name, chosen="", reason="", predicted={"cost/usd_iter": usd})
        for name, usd in (("width", 9.0), ("dispatch", 7.0))
    ]
    decisions.append(replace(decisions[0], predicted={}))
    plan = replace(a_plan(4, 3, iteration=4, decisions=tuple(decisions)), slots=SLOTS)
    records.put(store, layout.plan(4), plan)
    assert planning_request(store, a_config(), 5, LENGTHS).spent_usd == 57.0
    assert planning_request(a_run([], planned=[0]), a_config(), 1, LENGTHS).spent_usd == 0.0


def test_the_crew_that_was_asked_for_is_the_newest_plans_though_it_is_not_concluded():
    store = a_run([a_report(k) for k in range(4)], planned=[4])
    newest = read_plan(store, 4)
    records.put(store, layout.plan(4), replace(newest, slots=newest.slots[:1]))
    request = planning_request(store, a_config(), 5, LENGTHS)
    assert request.width == (("rollout", 1), ("zone-b", 2))
    assert request.planned_width == (("rollout", 1),)
    assert planning_request(a_run([]), a_config(), 0, LENGTHS).planned_width is None


def test_however_long_the_run_few_reports_are_read():
    store = a_run([a_report(iteration, **{"cost/usd_run": 1.0}) for iteration in range(60)])
    before = store.requests
    assert [report.iteration for report in recent_reports(store, 60)] == list(range(59, 59 - REPORTS_READ, -1))
    planning_request(store, a_config(), 60, LENGTHS)
    # Each report's twice, and each plan's once.
    assert store.requests.gets - before.gets <= 3 * REPORTS_READ + 2
    assert store.requests.puts == before.puts


CURVES = st.lists(
    st.dictionaries(st.integers(1, 64), st.floats(1e-4, 10.0), max_size=8).map(lambda d: tuple(sorted(d.items()))),
    max_size=8,
)


@given(curves=CURVES)
def test_the_curve_rises_stays_within_what_was_measured_and_has_every_batch(curves):
    curve = observed_step_time([replace(OBSERVED, step_s=points) for points in curves])
    measured = [point for points in curves for point in points]
    if not measured:
        assert curve is NOMINAL
        return
    batches, steps = zip(*curve.points, strict=True)
    assert list(batches) == sorted({batch for batch, _ in measured})
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(steps))
    times = [step_s for _, step_s in measured]
    assert min(times) * (1 - 1e-9) <= min(steps)
    assert max(steps) <= max(times) * (1 + 1e-9)


def test_one_slow_outlier_does_not_lift_what_is_behind_it():
    curve = observed_step_time([replace(OBSERVED, step_s=((1, 0.05), (2, 0.01), (4, 0.02)))])
    assert curve.points == tuple((batch, pytest.approx(0.08 / 3)) for batch in (1, 2, 4))


def test_the_waiting_for_tools_is_that_of_the_last_reports_and_none_at_first():
    def waited(iteration, tool_s, lengths):
        return replace(
            a_report(iteration, **({} if tool_s is None else {"turns/tool_seconds": tool_s})), lengths=lengths
        )

    turns = {"turns": {"tools": ["tests.tool_functions:add"]}}
    assert planning_request(MemoryStore(), a_config(**turns), 0, LENGTHS).tool_s_per_token == 0.0
    # The second had no turn: its tokens say nothing.
    store = a_run([waited(0, 30.0, (60, 40)), waited(1, None, (500,)), waited(2, 10.0, (100,))])
    assert planning_request(store, a_config(**turns), 3, LENGTHS).tool_s_per_token == pytest.approx(0.2)
    silent = a_run([waited(0, None, (500,))])
    assert planning_request(silent, a_config(**turns), 1, LENGTHS).tool_s_per_token == 0.0
