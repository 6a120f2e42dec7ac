"""What a worker of several ranks does follows from what each of them says."""

import itertools
import signal

import pytest

from tasks.sharing.rank_states import PROGRESS, RankEnd, failed, merged
from tasks.sharing.workers import ON_DEVICE, Restored, WorkerState

READ = Restored(tier="host memory", seconds=1.0, num_bytes=5, ahead=False)


def test_the_state_of_one_rank_is_that_of_the_worker():
    state = WorkerState(phase="publishing", iteration=3, digest="d", bytes_held=4, restored=READ, replays=2)
    assert merged([state]) == state


@pytest.mark.parametrize("phases", list(itertools.product(sorted(set(PROGRESS) - {"absent"}), repeat=2)))
def test_the_device_is_free_when_the_last_rank_has_left_it(phases):
    states = [WorkerState(phase=phase) for phase in phases]
    if "prefetching" not in phases:
        assert merged(states).has_device == any(phase in ON_DEVICE for phase in phases)
    assert merged(states).phase == min(phases, key=PROGRESS.__getitem__)


def test_groups_are_waited_for_by_the_first_rank_alone():
    assert merged([WorkerState(phase="waiting"), WorkerState(phase="training")]).phase == "waiting"
    assert merged([WorkerState(phase="training"), WorkerState(phase="training")]).phase == "training"


@pytest.mark.parametrize(("digests", "found"), [(("a", "a"), "a"), (("a", "b"), None), (("a", None), None)])
def test_a_state_is_resident_only_if_every_rank_holds_its_part_of_it(digests, found):
    states = [WorkerState(phase="parked", digest=digest, bytes_held=3) for digest in digests]
    assert (merged(states).digest, merged(states).bytes_held) == (found, 6)


def test_a_state_is_restored_when_every_rank_has_its_part_which_may_come_from_several_tiers():
    far = Restored(tier="object store", seconds=3.0, num_bytes=7, ahead=False)
    states = [WorkerState(phase="training", restored=READ), WorkerState(phase="training", restored=far)]
    assert merged(states).restored == Restored(tier="object store", seconds=3.0, num_bytes=12, ahead=False)
    assert merged([states[0], WorkerState(phase="restoring")]).restored is None


TRAINS = WorkerState(phase="training", iteration=2, digest="d", bytes_held=3)


def said(rank, at_s, message, *, lasting=True):
    failure = WorkerState(phase="failed", message=message, lasting=lasting)
    return RankEnd(rank=rank, code=1, failure=failure, told_at_s=at_s)


def test_the_first_failure_is_the_reason_and_the_others_are_its_consequences():
    found = failed(TRAINS, [said(0, 5.0, "a peer is gone"), said(1, 4.0, "out of memory")])
    assert (found.phase, found.message, found.lasting) == ("failed", "out of memory", True)
    assert (found.iteration, found.digest, found.bytes_held) == (2, None, 0)
    found = failed(TRAINS, [said(0, 5.0, "a peer is gone", lasting=False), said(1, 4.0, "no answer", lasting=False)])
    assert (found.message, found.lasting) == ("no answer", False)


@pytest.mark.parametrize("code", [-signal.SIGABRT, -signal.SIGKILL, 1])
def test_a_failure_that_lasts_is_hidden_neither_by_a_silent_end_nor_by_one_that_does_not_last(code):
    """NCCL's watchdog aborts a rank whose peer has failed, and says nothing to the host."""
    found = failed(TRAINS, [RankEnd(rank=0, code=code), said(1, 5.0, "not finite")])
    assert (found.message, found.lasting) == ("not finite", True)
    found = failed(TRAINS, [said(0, 4.0, "no answer", lasting=False), said(1, 5.0, "not finite")])
    assert (found.message, found.lasting) == ("not finite", True)


def test_a_rank_that_ended_without_a_word_is_the_reason_and_the_phase_may_be_repeated():
    lost = RankEnd(rank=1, code=-signal.SIGKILL)
    found = failed(TRAINS, [said(0, 5.0, "a peer is gone", lasting=False), lost])
    assert (found.message, found.lasting) == ("its rank 1 ended with -9", False)
    assert failed(TRAINS, [RankEnd(rank=0, code=-signal.SIGKILL)]).message == "its process ended with -9"


def test_a_rank_that_the_host_killed_after_another_is_no_reason():
    killed = RankEnd(rank=1, code=-signal.SIGKILL, killed=True)
    found = failed(TRAINS, [said(0, 5.0, "not finite"), killed])
    assert (found.message, found.lasting) == ("not finite", True)
    assert failed(TRAINS, [killed]).message == "it was ended"
