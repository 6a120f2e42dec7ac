"""The claim lane: how a member looks for work, and what it reads in between."""

from dataclasses import replace

from storage.stores.store import StoreUnavailable
from tasks.crew_model.rebalance import LOOKS_MAX, Cause, Holder, Transfer
from tasks.sampling.session.actions import (
    ClaimedResponse,
    Claims,
    Lane,
    LookAround,
    ProbeClaims,
    ReadClaims,
    ReadClosed,
    ReadOwnUnit,
    Rest,
    Seen,
    Take,
    Taken,
)
from tests.told_machine import Told


def test_a_look_takes_from_each_source_once_and_holds_what_it_took_at_once():
    member = Told()
    member.tell(Lane.DECODE)
    member.tell(Lane.CLAIM)
    member.tell(Lane.CLAIM, False)
    member.tell(Lane.CLAIM)
    assert member.tell(Lane.CLAIM, ())[0] == ReadClosed()
    assert member.tell(Lane.CLAIM, False)[0] == ReadClaims()  # nothing to hold: it looks around
    assert member.tell(Lane.CLAIM)[0] == ReadOwnUnit({}, cuts=False, has_cut=False)
    assert member.tell(Lane.CLAIM, False)[0] == LookAround({}, 0, 0)
    lost = {name: a_holder(name) for name in ("00001-x", "00001-y")}
    first = member.tell(Lane.CLAIM, Seen(holders=lost))[0]
    assert isinstance(first, Take)
    taken = Taken((ClaimedResponse(9, 2, (1,)),), 1)
    assert member.tell(Lane.CLAIM, taken, Claims({9: 2}, 1, 1))[0] == ReadClosed()
    second = member.tell(Lane.CLAIM, False)[0]
    assert {first.transfer.incarnation, second.transfer.incarnation} == lost.keys()
    assert list(member.state.holdings.held) == [9]
    assert member.state.heartbeat_state().claims == 1
    # An earlier claim came to light, which the next look will hand out.
    member.tell(Lane.CLAIM, Taken((ClaimedResponse(10, 3, ()),), 1), Claims({9: 2, 10: 3, 12: 4}, 3, 1))
    rest = member.tell(Lane.CLAIM, False)
    assert isinstance(rest[0], Rest)
    assert member.state.heartbeat_state().claims == 2


def test_what_a_slots_claim_gives_is_held_before_the_member_looks_around():
    member = Told()
    member.tell(Lane.DECODE)
    for result in (None, False, None, (ClaimedResponse(9, 2, ()),)):
        member.tell(Lane.CLAIM, result)
    member.tell(Lane.CLAIM, False)
    assert list(member.state.holdings.held) == [9]


def looking():
    """A member that got nothing for its slot and has read the claims."""
    member = Told()
    member.tell(Lane.DECODE)
    for result in (None, False, None, (), False):
        member.tell(Lane.CLAIM, result)
    return member


def test_members_that_a_look_does_not_see_are_left_their_part():
    member = looking()
    member.tell(Lane.CLAIM)
    member.tell(Lane.CLAIM, False)
    empty = {str(n): replace(a_holder(str(n)), lost=False, unfinished=0, running=0, room=8) for n in range(LOOKS_MAX)}
    [take] = member.tell(Lane.CLAIM, Seen(holders=empty, unclaimed=8 * LOOKS_MAX, unseen=3 * LOOKS_MAX - 1))
    assert take == Take(Transfer(cause=Cause.UNCLAIMED, incarnation=None, count=2))


def test_the_news_are_read_between_the_parts_of_long_journals():
    member = looking()
    assert member.tell(Lane.CLAIM)[0] == ReadOwnUnit({}, cuts=False, has_cut=False)
    for asked in (ReadOwnUnit, LookAround):
        for _ in range(3):
            assert isinstance(member.tell(Lane.CLAIM, None)[0], ProbeClaims)
            assert member.tell(Lane.CLAIM)[0] == ReadClosed()
            again = member.tell(Lane.CLAIM, False)[0]
            assert isinstance(again, asked)
        again = member.tell(Lane.CLAIM, False if asked is ReadOwnUnit else Seen())[0]
    assert isinstance(again, Rest)


def test_journals_are_not_read_to_the_end_when_the_iteration_is_closed_meanwhile():
    member = looking()
    member.tell(Lane.CLAIM)
    member.tell(Lane.CLAIM, False)
    member.tell(Lane.CLAIM, None)
    assert member.tell(Lane.CLAIM)[0] == ReadClosed()
    assert isinstance(member.tell(Lane.CLAIM, True)[0], Rest)


def test_what_was_claimed_in_a_closed_iteration_is_not_begun_because_its_journal_may_be_gone():
    for claimed_first in (True, False):
        member = Told()
        member.tell(Lane.DECODE)
        for result in (None, False, None):
            member.tell(Lane.CLAIM, result)
        work = (ClaimedResponse(9, 2, (1,)),)
        if not claimed_first:
            for result in ((), False, None, False):
                member.tell(Lane.CLAIM, result)
            [take] = member.tell(Lane.CLAIM, Seen(holders={"00001-x": a_holder("00001-x")}))
            assert isinstance(take, Take)
        result = work if claimed_first else Taken(work, 1)
        assert member.tell(Lane.CLAIM, result, Claims({9: 2}, 1, 1))[0] == ReadClosed()
        member.tell(Lane.CLAIM, True)
        assert not member.state.holdings.held
        assert member.state.is_done()


def test_whether_the_own_responses_have_ended_is_read_again_after_a_search_which_reads_claims():
    member = looking()
    assert member.tell(Lane.CLAIM)[0] == ReadOwnUnit({}, cuts=False, has_cut=False)
    assert isinstance(member.tell(Lane.CLAIM, True)[0], LookAround)
    assert member.state.own_ended
    assert member.tell(Lane.CLAIM, Seen())[0] == ReadClaims()
    assert member.tell(Lane.CLAIM)[0] == ReadOwnUnit({}, cuts=False, has_cut=False)
    member.tell(Lane.CLAIM, False)
    assert not member.state.own_ended


def test_a_member_does_not_leave_after_a_search_that_failed_because_it_may_have_claimed_something():
    member = looking()
    member.tell(Lane.CLAIM)
    member.tell(Lane.CLAIM, True)
    assert member.state.own_ended
    member.state.nothing_left = True  # as the look before this one had found
    member.fail(Lane.CLAIM, StoreUnavailable("no answer"))
    assert not member.state.own_ended
    assert not member.state.nothing_left
    assert not member.state.is_looking


def a_holder(name):
    return Holder(
        incarnation=name, lost=True, idle=False, unfinished=2, running=2, waiting=0, released=0, tokens_per_s=None,
        plateau=0,
    )  # fmt: skip
