"""How many members: time against dollars, bounds, budgets, the cap, and one more or one less."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.planning_records import SeedingRecord
from tasks.planning.crew import planned_crew
from tasks.planning.offer import ReservedOffer
from tasks.planning.request import BudgetExceeded
from tasks.planning.step_time import NOMINAL
from tasks.planning.width import choose_width
from tests.planning_requests import CURVE, a_request, an_offer, some_lengths, waits
from tests.property_examples import part_of_examples

COST = {"width": "cost"}
RESERVED = ReservedOffer(engines=2, usd_per_h=16.0, responses_max=64, step_time=CURVE)
EVEN = some_lengths(64, sigma=0.05)


def weighed(cost_weight: float, *offers, **changes):
    request = a_request(*(offers or [an_offer(count_max=8)]), **{"lengths": EVEN} | changes)
    return choose_width(replace(request, settings=replace(request.settings, width="cost", cost_weight=cost_weight)))


def test_fixed_is_all_there_are():
    choice = choose_width(a_request(an_offer(count_max=3), an_offer("spot", count_max=2)))
    assert choice.crew.counts == (3, 2)


@pytest.mark.parametrize("cost_weight", [0.0, 0.3, 0.7, 1.0])
def test_the_choice_is_the_argmin_of_what_is_weighed(cost_weight):
    lengths = some_lengths(12, sigma=0.3)
    every = [planned_crew(a_request(an_offer(count_max=8), lengths=lengths), (n,)) for n in range(1, 9)]
    time, usd = (np.array([getattr(crew, name) for crew in every]) for name in ("rollout_s", "usd_iteration"))
    scores = time ** (1 - cost_weight) * usd**cost_weight
    choice = weighed(cost_weight, lengths=lengths)
    assert sorted(score for _, score in choice.considered) == pytest.approx(sorted(scores / scores.min()))
    assert choice.considered[0][1] == 1.0
    assert scores[choice.crew.size - 1] == pytest.approx(scores.min())


def test_of_many_groups_the_choice_is_near_the_argmin():
    every = [planned_crew(a_request(an_offer(count_max=12), lengths=EVEN), (n,)) for n in range(1, 13)]
    time, usd = (np.array([getattr(crew, name) for crew in every]) for name in ("rollout_s", "usd_iteration"))
    scores = time**0.7 * usd**0.3
    choice = weighed(0.3, an_offer(count_max=12), lengths=EVEN)
    assert len(choice.considered) < 12
    assert scores[choice.crew.size - 1] < 1.05 * scores.min()


@pytest.mark.parametrize("groups", [6, 64])
def test_more_weight_of_dollars_never_costs_more(groups):
    chosen = [weighed(weight, lengths=some_lengths(groups, sigma=0.3)).crew for weight in (0.0, 0.3, 0.7, 1.0)]
    dollars = [crew.usd_iteration for crew in chosen]
    seconds = [crew.rollout_s for crew in chosen]
    assert dollars == sorted(dollars, reverse=True)
    assert seconds == sorted(seconds)


def test_a_dearer_pool_loses_its_members_to_a_cheaper_one():
    def chosen(usd_per_h):
        offers = an_offer(count_min=0), an_offer("spot", count_min=0, usd_per_h=usd_per_h)
        return weighed(0.6, *offers, lengths=some_lengths(12, sigma=0.05)).crew.counts

    assert chosen(0.5)[1] > chosen(8.0)[1]
    assert chosen(0.5)[0] < chosen(8.0)[0]


def test_cold_starts_take_members_away():
    """Of dollars alone, where waiting costs 16 an hour and a member 2: many, unless each is paid for its start."""

    def size(start_s: float) -> int:
        return weighed(1.0, an_offer(count_max=8, start_s=start_s), reserved=RESERVED, train_s=1.0).crew.size

    assert size(0.0) > size(30.0) > size(600.0)


def test_more_than_training_can_use_are_not_asked_for():
    past = {"waits": waits(rollout_s=100.0, members=5.0), "train_s": 200.0}
    choice = weighed(0.0, **past)
    assert choice.members_cap == 3
    assert choice.crew.size <= 3
    assert "more than 3 members would only wait" in choice.reason
    seeded = SeedingRecord(seeding_s=100.0, members=5)
    more = weighed(0.0, **past, reserved=replace(RESERVED, engines=4), seeding=seeded)
    assert more.members_cap == 5
    # What must be there is, whatever training can use.
    assert weighed(0.0, an_offer(count_min=5, count_max=8), **past).crew.size == 5


def test_what_nobody_measured_is_not_weighed():
    unknown = an_offer(count_max=5, step_time=NOMINAL)
    choice = choose_width(a_request(unknown, settings=COST | {"usd_per_iteration_max": 1e-6}))
    assert choice.crew.counts == (5,)
    assert "no step time is measured" in choice.reason


def test_a_budget_takes_what_it_allows_of_the_widths():
    free = weighed(0.0)
    least = weighed(1.0).crew.usd_iteration
    budget = (free.crew.usd_iteration + least) / 2
    for request in (
        a_request(an_offer(count_max=8), lengths=EVEN, settings={"usd_per_iteration_max": budget}),
        a_request(an_offer(count_max=8), lengths=EVEN, settings={"usd_per_run_max": 5 + budget}, spent_usd=5.0),
        a_request(an_offer(count_max=8), lengths=EVEN, settings=COST | {"usd_per_iteration_max": budget}),
        a_request(
            an_offer(count_max=8),
            lengths=EVEN,
            settings={"width": "balance", "usd_per_iteration_max": budget},
            width=(("rollout", 8),),
        ),
    ):
        assert choose_width(request).crew.usd_iteration <= budget


def test_a_budget_that_nothing_meets_is_refused_by_name():
    tight = a_request(an_offer(count_max=8), lengths=EVEN, settings=COST | {"usd_per_iteration_max": 1e-3})
    with pytest.raises(BudgetExceeded, match=r"^usd_per_iteration_max: 0\.001 given, and an iteration takes at least"):
        choose_width(tight)
    least = weighed(1.0).crew.usd_iteration
    spent = replace(tight, settings=replace(tight.settings, usd_per_iteration_max=None, usd_per_run_max=5.0))
    message = rf"^usd_per_run_max: 5 given, 5 of it spent, .* \(rollout \d\); allowed: at least {5 + least:.6g}$"
    with pytest.raises(BudgetExceeded, match=message):
        choose_width(replace(spent, spent_usd=5.0))


def test_the_least_that_is_named_is_enough():
    tight = a_request(an_offer(count_max=8), lengths=EVEN, settings={"usd_per_iteration_max": 1e-3})
    with pytest.raises(BudgetExceeded) as refused:
        choose_width(tight)
    enough = float(str(refused.value).rpartition(" ")[2]) * (1 + 1e-5)
    chosen = choose_width(replace(tight, settings=replace(tight.settings, usd_per_iteration_max=enough)))
    assert chosen.crew.usd_iteration <= enough


def test_the_trainers_machines_make_a_longer_iteration_dearer():
    """With 16 dollars an hour waiting, waiting less is cheaper, too."""
    alone = weighed(1.0)
    waiting = weighed(1.0, reserved=RESERVED, train_s=1.0)
    assert waiting.crew.rollout_s < alone.crew.rollout_s


def test_no_member_at_all_is_a_choice_where_the_trainer_may_do_it_alone():
    dear = an_offer(count_min=0, count_max=4, usd_per_h=500.0)
    assert weighed(1.0, dear, reserved=RESERVED, settings={"seeding": "auto"}, train_s=5.0).crew.size == 0
    assert weighed(1.0, dear, reserved=RESERVED, train_s=5.0).crew.size == 1
    assert weighed(1.0, dear).crew.size == 1


def balanced(before: int | None, rollout_s: float, train_s: float = 100.0, **offer):
    return choose_width(
        a_request(
            an_offer(**{"count_max": 8} | offer),
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
    offers = an_offer(usd_per_h=2.0), an_offer("spot", usd_per_h=1.0)
    request = a_request(
        *offers, lengths=EVEN, settings={"width": "balance"}, width=(("rollout", 2), ("spot", 2)), train_s=100.0
    )
    assert choose_width(replace(request, waits=waits(rollout_s=300.0))).crew.counts == (2, 3)
    assert choose_width(replace(request, waits=waits(rollout_s=30.0))).crew.counts == (1, 2)
    full = replace(request, width=(("rollout", 2), ("spot", 4)))
    assert choose_width(replace(full, waits=waits(rollout_s=300.0))).crew.counts == (3, 4)


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.25))
@given(st.integers(1, 2), st.integers(0, 30), st.integers(1, 60), st.floats(0, 1), st.integers(0, 3))
def test_wide_crews_are_searched_within_their_bounds(pools, low, more, cost_weight, seed):
    offers = [an_offer(name, count_min=low, count_max=low + more) for name in ("rollout", "spot")[:pools]]
    choice = weighed(cost_weight, *offers, lengths=some_lengths(32, seed=seed))
    assert all(low <= count <= low + more for count in choice.crew.counts)
    assert choice.crew.size >= 1
    assert len(choice.considered) <= 65


def test_of_very_many_pools_some_are_tried():
    offers = [an_offer(f"pool-{k}", count_min=0, count_max=50, usd_per_h=1.0 + k) for k in range(12)]
    chosen = weighed(0.8, *offers).crew
    assert chosen.counts[0] >= 1
    assert sum(chosen.counts[6:]) == 0


def test_the_cap_lets_slow_members_do_the_work_of_fewer_fast_ones():
    """2 fast members took 300 s of 200 in training: 3 of them would do, or 9 that are three times as slow."""
    offers = an_offer(count_min=0), an_offer("spot", count_min=0, count_max=12, step_time=CURVE.scaled(3.0))
    past = {"waits": waits(rollout_s=300.0, members=2.0), "width": (("rollout", 2),), "train_s": 200.0}
    assert weighed(0.5, *offers, **past).members_cap == 9
    assert weighed(0.5, offers[0], **past).members_cap == 3
