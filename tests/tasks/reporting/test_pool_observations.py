"""What the next plan hears of each pool's machines."""

from dataclasses import replace

import pytest

from storage.records.records import TRAIN_POOL, SlotLife
from tasks.crew_model.decode_rate import POINTS_MAX
from tasks.reporting.pool_observations import pool_observations, pooled
from tests.journals import beat


def a_life(slot, started_at_s, working_at_s, ended_at_s, state="gone", pool="rollout"):
    return SlotLife(
        slot=slot,
        incarnation=f"{slot:05d}-{started_at_s}",
        pool=pool,
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
        state=state,
        tokens_kept=1,
        tokens_recovered=0,
        tokens_regenerated=0,
        working_at_s=working_at_s,
    )


def test_an_undisturbed_pool():
    lives = [a_life(0, 0, 10, 110), a_life(1, 0, 30, 60)]
    (seen,) = pool_observations(lives, [])
    # Who left because nothing was left is there until the end: 100 s and 80 s of 100 s.
    assert seen.members == pytest.approx(1.8)
    assert (seen.members_at_end, seen.losses, seen.machine_s, seen.start_s) == (2, 0, 170, 20)
    assert seen.step_s == ()


def test_a_standing_member_starts_when_the_plan_is_there():
    lives = [a_life(0, 0, 32, 110), a_life(1, 40, 44, 110)]
    (seen,) = pool_observations(lives, [], planned_at_s=30)
    assert (seen.start_s, seen.machine_s) == (3, 180)
    (seen,) = pool_observations(lives, [], planned_at_s=100)
    assert seen.start_s == 0  # a clock is wrong


def test_a_lost_machine_is_a_loss_until_it_comes_back():
    lost = a_life(1, 0, 10, 60, "lost")
    steady = a_life(0, 0, 10, 110)
    (seen,) = pool_observations([steady, lost], [])
    assert (seen.members, seen.members_at_end, seen.losses) == (pytest.approx(1.5), 1, 1)
    (seen,) = pool_observations([steady, lost, a_life(1, 70, 85, 110)], [])
    assert (seen.members, seen.members_at_end, seen.losses) == (pytest.approx(1.75), 2, 1)
    (seen,) = pool_observations([steady, replace(lost, state="left")], [])
    assert (seen.members_at_end, seen.losses) == (1, 1)


def test_the_trainers_machine_loses_nothing_when_it_hands_over():
    lives = [a_life(0, 0, 10, 110), a_life(1, 0, 10, 40, "left", TRAIN_POOL)]
    crew, trainer = pool_observations(lives, [])
    assert (crew.pool, trainer.pool) == ("rollout", TRAIN_POOL)
    assert (trainer.losses, trainer.machine_s) == (0, 40)
    assert pool_observations([replace(lives[1], state="lost")], [])[0].losses == 1


def test_a_pool_to_which_nobody_came_and_one_that_never_worked():
    waiting = a_life(0, 0, None, 50)
    near, far = pool_observations([waiting], [], ["rollout", "zone-b"])[:2]
    assert (near.start_s, near.members, near.members_at_end) == (None, 1.0, 1)
    assert (far.pool, far.members, far.members_at_end, far.machine_s, far.start_s) == ("zone-b", 0.0, 0, 0, None)


def test_step_times_are_those_of_the_pools_members():
    told = [
        replace(beat("00000-a", number=1), step_s=((1, 0.010), (4, 0.030))),
        replace(beat("00001-a", number=1), step_s=((1, 0.014), (8, 0.050))),
        replace(beat("00002-a", number=1), pool="far", step_s=((1, 9.0),)),
    ]
    far, near = pool_observations([a_life(0, 0, 1, 2)], told, ["far"])
    assert near.step_s == ((1, pytest.approx(0.012)), (4, 0.030), (8, 0.050))
    assert far.step_s == ((1, 9.0),)


def test_many_points_are_thinned_evenly():
    points = pooled([tuple((batch, batch / 100) for batch in range(1, 65))])
    assert len(points) == POINTS_MAX
    assert (points[0], points[-1]) == ((1, 0.01), (64, 0.64))
    assert [batch for batch, _ in points] == sorted({batch for batch, _ in points})
