"""How many members: time against dollars, bounds, budgets, the cap, and one more or one less."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.crew_model.step_time import NOMINAL
from tasks.planning import estimate
from tasks.planning.capacity import TrainerCapacity
from tasks.planning.estimate import MEMBERS_MAX, PLAYED_MAX, ROLLOUTS_MAX, Estimator
from tasks.planning.request import BudgetExceeded
from tasks.planning.width import CLEARLY, WIDTHS_MAX, choose_width
from tests.planning_requests import CURVE, a_pool, a_request, some_lengths, waits
from tests.property_examples import part_of_examples

COST = {"width": "cost"}
SEEDED = {"seeding": "auto"}
RESERVED = TrainerCapacity(engines=2, usd_per_h=16.0, responses_max=64, step_time=CURVE)
EVEN = some_lengths(64, sigma=0.05)
# Two iterations of these lengths.
SEEN = (EVEN.expected[:, None].repeat(4, axis=1),) * 2


def weighed(cost_weight: float, *pools, **changes):
    request = a_request(*(pools or [a_pool(count_max=8)]), **{"lengths": EVEN} | changes)
    return choose_width(replace(request, settings=replace(request.settings, width="cost", cost_weight=cost_weight)))


def test_fixed_is_all_there_are():
    choice = choose_width(a_request(a_pool(count_max=3), a_pool("spot", count_max=2)))
    assert choice.crew.counts == (3, 2)


def every(count, **changes):
    """Seconds and dollars of each number of members."""
    request = a_request(a_pool(count_max=count), **changes)
    estimates = [Estimator(request).estimate((n,), None) for n in range(1, count + 1)]
    return (np.array([getattr(one, name) for one in estimates]) for name in ("lasting_s", "lasting_usd"))


@pytest.mark.parametrize("cost_weight", [0.0, 0.3, 0.7, 1.0])
def test_the_choice_is_the_argmin_of_what_is_weighed(cost_weight):
    lengths = some_lengths(12, sigma=0.3)
    seconds, usd = every(8, lengths=lengths)
    scores = seconds ** (1 - cost_weight) * usd**cost_weight
    choice = weighed(cost_weight, lengths=lengths)
    assert sorted(score for _, score in choice.considered) == pytest.approx(sorted(scores / scores.min()))
    assert choice.considered[0][1] == 1.0
    assert scores[choice.crew.size - 1] == pytest.approx(scores.min())


def test_of_many_widths_the_choice_is_near_the_argmin():
    seconds, usd = every(200, lengths=EVEN)
    scores = seconds**0.7 * usd**0.3
    choice = weighed(0.3, a_pool(count_max=200), lengths=EVEN)
    assert len(choice.considered) <= WIDTHS_MAX
    assert scores[choice.crew.size - 1] < 1.01 * scores.min()


@pytest.mark.parametrize("groups", [6, 64])
def test_more_weight_of_dollars_never_costs_more(groups):
    chosen = [weighed(weight, lengths=some_lengths(groups, sigma=0.3)).estimate for weight in (0.0, 0.3, 0.7, 1.0)]
    dollars = [one.usd_iteration for one in chosen]
    seconds = [one.iteration_s for one in chosen]
    assert dollars == sorted(dollars, reverse=True)
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(("better", "stays"), [(0.5, True), (2.0, False)])
def test_the_last_iterations_crew_stays_unless_another_is_clearly_better(better, stays):
    seconds, _ = every(8, lengths=EVEN, past_lengths=SEEN)
    last = a_pool(count_max=8)
    # By how much the best would have to be better, or twice that.
    free = weighed(0.0, last, past_lengths=SEEN).crew.size
    near = next(n for n in range(8, 0, -1) if seconds[n - 1] > seconds.min() * (1 + better * CLEARLY / (1 - CLEARLY)))
    asked = (("rollout", near),)
    choice = weighed(0.0, last, past_lengths=SEEN, planned_width=asked)
    if stays and seconds[near - 1] * (1 - CLEARLY) <= seconds.min():
        assert choice.crew.size == near
        assert choice.reason == "as before; no other is clearly better"
    else:
        assert choice.crew.size == free
    # Until two iterations are concluded, the newest plan's crew was chosen before anything was known.
    assert weighed(0.0, last, past_lengths=SEEN[:1], planned_width=asked).crew.size == free


def test_no_crew_stays_as_well_as_any_other_and_the_newest_plan_counts():
    """A member would be better, but not clearly, than the trainer's machines alone."""
    past = {"settings": {"seeding": "auto"}, "reserved": RESERVED, "train_s": 1.0, "waits": waits(members=0.0)}
    past["past_lengths"] = SEEN
    pool, weight = a_pool(count_min=0, count_max=1, start_s=0.0), 0.5

    def ratio(usd_per_h: float) -> float:
        considered = weighed(weight, replace(pool, usd_per_h=usd_per_h), **past).considered
        scores = {sum(one.counts): score for one, score in considered}
        return scores[0] / scores[1]

    usd_per_h = next(price for price in np.arange(0.5, 500.0, 0.5) if ratio(price) < 1 + CLEARLY / 2)
    assert ratio(usd_per_h) > 1
    fair = replace(pool, usd_per_h=usd_per_h)
    assert weighed(weight, fair, **past).crew.size == 1
    assert weighed(weight, fair, planned_width=(), **past).crew.size == 0
    # The last concluded iteration had a member; that of the newest plan, which is under way, has none.
    assert weighed(weight, fair, width=(("rollout", 1),), planned_width=(), **past).crew.size == 0


def test_a_dearer_pool_loses_its_members_to_a_cheaper_one():
    def chosen(usd_per_h):
        pools = a_pool(count_min=0), a_pool("spot", count_min=0, usd_per_h=usd_per_h)
        return weighed(0.6, *pools, lengths=some_lengths(12, sigma=0.05)).crew.counts

    assert chosen(0.5)[1] > chosen(8.0)[1]
    assert chosen(0.5)[0] < chosen(8.0)[0]


def test_machine_starts_take_members_away():
    """By time alone: a start is worth it only if it is short beside the iterations that it serves."""

    def size(machine_start_s: float) -> int:
        past = {"settings": {"seeding": "auto"}, "reserved": RESERVED, "train_s": 1.0, "waits": waits(members=0.0)}
        pool = a_pool(
            count_min=0, count_max=8, usd_per_h=0.5, start_s=0.0, machine_start_s=machine_start_s, machines_present=0
        )
        return weighed(0.5, pool, **past).crew.size

    assert size(0.0) > size(30.0) > size(3000.0) == 0


def test_what_nobody_measured_is_not_weighed():
    unknown = a_pool(count_max=5, step_time=NOMINAL)
    choice = choose_width(a_request(unknown, settings=COST | {"usd_per_iteration_max": 1e-6}))
    assert choice.crew.counts == (5,)
    assert "no step time is measured" in choice.reason


def test_a_budget_takes_what_it_allows_of_the_widths():
    free = weighed(0.0)
    least = weighed(1.0).estimate.usd_iteration
    budget = (free.estimate.usd_iteration + least) / 2
    for request in (
        a_request(a_pool(count_max=8), lengths=EVEN, settings={"usd_per_iteration_max": budget}),
        a_request(a_pool(count_max=8), lengths=EVEN, settings={"usd_per_run_max": 5 + budget}, spent_usd=5.0),
        a_request(a_pool(count_max=8), lengths=EVEN, settings=COST | {"usd_per_iteration_max": budget}),
        a_request(
            a_pool(count_max=8),
            lengths=EVEN,
            settings={"width": "balance", "usd_per_iteration_max": budget},
            width=(("rollout", 8),),
        ),
    ):
        assert choose_width(request).estimate.usd_iteration <= budget


def test_a_budget_that_nothing_meets_is_refused_by_name():
    tight = a_request(a_pool(count_max=8), lengths=EVEN, settings=COST | {"usd_per_iteration_max": 1e-3})
    with pytest.raises(BudgetExceeded, match=r"^usd_per_iteration_max: 0\.001 given, and an iteration takes at least"):
        choose_width(tight)
    least = weighed(1.0).estimate.usd_iteration
    spent = replace(tight, settings=replace(tight.settings, usd_per_iteration_max=None, usd_per_run_max=5.0))
    message = rf"^usd_per_run_max: 5 given, 5 of it spent, .* \(rollout \d\); allowed: at least {5 + least:.6g}$"
    with pytest.raises(BudgetExceeded, match=message):
        choose_width(replace(spent, spent_usd=5.0))


def test_the_least_that_is_named_is_enough():
    tight = a_request(a_pool(count_max=8), lengths=EVEN, settings={"usd_per_iteration_max": 1e-3})
    with pytest.raises(BudgetExceeded) as refused:
        choose_width(tight)
    enough = float(str(refused.value).rpartition(" ")[2]) * (1 + 1e-5)
    chosen = choose_width(replace(tight, settings=replace(tight.settings, usd_per_iteration_max=enough)))
    assert chosen.estimate.usd_iteration <= enough


def test_the_trainers_machines_make_a_longer_iteration_dearer():
    """With 16 dollars an hour waiting, waiting less is cheaper, too."""
    alone = weighed(1.0)
    waiting = weighed(1.0, reserved=RESERVED, train_s=1.0)
    assert waiting.estimate.rollout_s < alone.estimate.rollout_s


def test_a_crew_without_members_is_not_kept_where_the_trainer_may_not_do_it_alone():
    assert weighed(0.0, a_pool(count_min=0, count_max=1), width=(("rollout", 0),)).crew.size == 1


def test_no_member_at_all_is_a_choice_where_the_trainer_may_do_it_alone():
    dear = a_pool(count_min=0, count_max=4, usd_per_h=500.0)
    assert weighed(1.0, dear, reserved=RESERVED, settings={"seeding": "auto"}, train_s=5.0).crew.size == 0
    assert weighed(1.0, dear, reserved=RESERVED, train_s=5.0).crew.size == 1
    assert weighed(1.0, dear).crew.size == 1


def balanced(before: int | None, rollout_s: float, train_s: float = 100.0, **pool):
    return choose_width(
        a_request(
            a_pool(**{"count_max": 8, "responses_max": 8, "start_s": 0.0} | pool),
            lengths=EVEN,
            settings={"width": "balance"},
            width=() if before is None else (("rollout", before),),
            waits=waits(rollout_s=rollout_s),
            train_s=train_s,
        )
    )


def test_balance_takes_one_more_or_one_less_or_stays():
    assert balanced(4, 200.0).crew.counts == (5,)
    assert balanced(4, 50.0).crew.counts == (3,)
    assert balanced(4, 101.0).crew.counts == (4,)
    assert balanced(8, 900.0).crew.counts == (8,)
    assert balanced(4, 1.0, count_min=4).crew.counts == (4,)
    assert balanced(None, 1.0).crew.counts == (8,)
    assert balanced(9, 101.0, count_max=6).crew.counts == (6,)


def test_balance_takes_from_the_pool_with_the_most_tokens_per_dollar():
    pools = a_pool(usd_per_h=2.0), a_pool("spot", usd_per_h=1.0)
    request = a_request(
        *pools, lengths=EVEN, settings={"width": "balance"}, width=(("rollout", 2), ("spot", 2)), train_s=100.0
    )
    assert choose_width(replace(request, waits=waits(rollout_s=300.0))).crew.counts == (2, 3)
    assert choose_width(replace(request, waits=waits(rollout_s=30.0))).crew.counts == (1, 2)
    full = replace(request, width=(("rollout", 2), ("spot", 4)))
    assert choose_width(replace(full, waits=waits(rollout_s=300.0))).crew.counts == (3, 4)


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.25))
@given(st.integers(1, 2), st.integers(0, 30), st.integers(1, 60), st.floats(0, 1), st.integers(0, 3))
def test_wide_crews_are_searched_within_their_bounds(pools, low, more, cost_weight, seed):
    pools = [a_pool(name, count_min=low, count_max=low + more) for name in ("rollout", "spot")[:pools]]
    choice = weighed(cost_weight, *pools, lengths=some_lengths(32, seed=seed))
    assert all(low <= count <= low + more for count in choice.crew.counts)
    assert choice.crew.size >= 1
    assert len(choice.considered) <= WIDTHS_MAX


def test_of_very_many_pools_some_are_tried():
    pools = [a_pool(f"pool-{k}", count_min=0, count_max=50, usd_per_h=1.0 + k) for k in range(12)]
    chosen = weighed(0.8, *pools).crew
    assert chosen.counts[0] >= 1
    assert sum(chosen.counts[6:]) == 0


@pytest.mark.parametrize("there", [None, 2])
@pytest.mark.parametrize(("groups", "pools", "count"), [(256, 1, 16), (256, 3, 16), (8, 1, 400)])
def test_what_is_played_for_a_plan_is_bounded_however_many_ways_there_are(monkeypatch, there, groups, pools, count):
    played = []

    def counted(lengths, members, rules):
        played.append((lengths.size, len(members)))
        return modelled_rollout(lengths, members, rules)

    modelled_rollout = estimate.modelled_rollout
    monkeypatch.setattr(estimate, "modelled_rollout", counted)
    pools = [a_pool(f"pool {k}", count_max=count, machine_start_s=60.0, machines_present=there) for k in range(pools)]
    lengths = some_lengths(groups)
    known = {"reserved": replace(RESERVED, engines=8), "waits": waits(), "train_s": 100.0, "settings": SEEDED}
    weighed(0.3, *pools, lengths=lengths, past_lengths=(lengths.expected[:, None].repeat(4, axis=1),) * 8, **known)
    assert sum(responses for responses, _ in played) <= PLAYED_MAX * ROLLOUTS_MAX
    assert max(members for _, members in played) <= MEMBERS_MAX
