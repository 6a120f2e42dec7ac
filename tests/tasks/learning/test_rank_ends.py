"""Why ranks have failed follows from what each of them said and how it ended."""

import signal

import pytest

from tasks.learning.rank_ends import RankEnd, RankFailure, failure_of


def said(rank, at_s, message, *, lasting=True):
    return RankEnd(rank=rank, code=1, failure=RankFailure(message=message, lasting=lasting), reported_at_s=at_s)


def found(*ends):
    failure = failure_of(ends)
    return failure.message, failure.lasting


def test_the_first_failure_is_the_reason_and_the_others_are_its_consequences():
    assert found(said(0, 5.0, "a peer is gone"), said(1, 4.0, "out of memory")) == ("out of memory", True)
    several = (said(0, 5.0, "a peer is gone", lasting=False), said(1, 4.0, "no answer", lasting=False))
    assert found(*several) == ("no answer", False)


@pytest.mark.parametrize("code", [-signal.SIGABRT, -signal.SIGKILL, 1])
def test_a_failure_that_lasts_is_hidden_neither_by_a_silent_end_nor_by_one_that_does_not_last(code):
    """NCCL's watchdog aborts a rank whose peer has failed, and says nothing to the launcher."""
    assert found(RankEnd(rank=0, code=code), said(1, 5.0, "not finite")) == ("not finite", True)
    assert found(said(0, 4.0, "no answer", lasting=False), said(1, 5.0, "not finite")) == ("not finite", True)


def test_a_rank_that_ended_without_a_word_is_the_reason_and_the_work_may_be_repeated():
    lost = RankEnd(rank=1, code=-signal.SIGKILL)
    assert found(said(0, 5.0, "a peer is gone", lasting=False), lost) == ("its rank 1 ended with -9", False)
    assert found(RankEnd(rank=0, code=-signal.SIGKILL)) == ("its process ended with -9", False)


def test_a_rank_that_was_killed_after_another_and_one_whose_work_is_done_are_no_reason():
    killed = RankEnd(rank=1, code=-signal.SIGKILL, killed=True)
    assert found(said(0, 5.0, "not finite"), killed) == ("not finite", True)
    assert found(killed) == ("it was ended", False)
    assert found(RankEnd(rank=0, code=0, done=True), RankEnd(rank=1, code=0)) == ("its rank 1 ended with 0", False)
