"""What a worker of several ranks does follows from what each of them says."""

import itertools

import pytest

from tasks.learning.rank_ends import RankFailure
from tasks.sharing.process_workers import PROGRESS, failed_state, merged_state
from tasks.sharing.workers import ON_DEVICE, Restored, WorkerState

READ = Restored(tier="host memory", seconds=1.0, num_bytes=5, ahead=False)


def test_the_state_of_one_rank_is_that_of_the_worker():
    state = WorkerState(phase="publishing", iteration=3, digest="d", bytes_held=4, restored=READ, replays=2)
    assert merged_state([state]) == state


@pytest.mark.parametrize("phases", list(itertools.product(sorted(set(PROGRESS) - {"absent"}), repeat=2)))
def test_the_device_is_free_when_the_last_rank_has_left_it(phases):
    states = [WorkerState(phase=phase) for phase in phases]
    if "prefetching" not in phases:
        assert merged_state(states).has_device == any(phase in ON_DEVICE for phase in phases)
    assert merged_state(states).phase == min(phases, key=PROGRESS.__getitem__)


def test_groups_are_waited_for_by_the_first_rank_alone():
    assert merged_state([WorkerState(phase="waiting"), WorkerState(phase="training")]).phase == "waiting"
    assert merged_state([WorkerState(phase="training"), WorkerState(phase="training")]).phase == "training"


@pytest.mark.parametrize(("digests", "found"), [(("a", "a"), "a"), (("a", "b"), None), (("a", None), None)])
def test_a_state_is_resident_only_if_every_rank_holds_its_part_of_it(digests, found):
    states = [WorkerState(phase="parked", digest=digest, bytes_held=3) for digest in digests]
    assert (merged_state(states).digest, merged_state(states).bytes_held) == (found, 6)


def test_a_state_is_restored_when_every_rank_has_its_part_which_may_come_from_several_tiers():
    far = Restored(tier="object store", seconds=3.0, num_bytes=7, ahead=False)
    states = [WorkerState(phase="training", restored=READ), WorkerState(phase="training", restored=far)]
    assert merged_state(states).restored == Restored(tier="object store", seconds=3.0, num_bytes=12, ahead=False)
    assert merged_state([states[0], WorkerState(phase="restoring")]).restored is None


def test_a_worker_that_has_failed_holds_no_state_and_says_why():
    trains = WorkerState(phase="training", iteration=2, digest="d", bytes_held=3)
    found = failed_state(trains, RankFailure(message="out of memory", lasting=True))
    assert found == WorkerState(phase="failed", iteration=2, message="out of memory", lasting=True)
