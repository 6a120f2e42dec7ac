"""The claim lane: how a member looks for work, and what it reads in between."""

from tasks.planning.rebalance import Holder
from tasks.sampling.session.actions import (
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
    Work,
)
from tests.told_machine import Told


def test_a_look_takes_from_each_source_once_and_holds_what_it_took_at_once():
    member = Told()
    member.tell(Lane.DECODE)
    member.tell(Lane.CLAIM)
    member.tell(Lane.CLAIM, False)
    member.tell(Lane.CLAIM)
    assert member.tell(Lane.CLAIM, ())[0] == ReadClaims()  # nothing to hold: it looks around
    assert member.tell(Lane.CLAIM)[0] == ReadOwnUnit(cuts=False, has_cut=False)
    assert member.tell(Lane.CLAIM, False)[0] == LookAround({}, 0, 0)
    lost = {name: a_holder(name) for name in ("00001-x", "00001-y")}
    first = member.tell(Lane.CLAIM, Seen(holders=lost))[0]
    assert isinstance(first, Take)
    taken = Taken((Work(9, 2, (1,)),), 1)
    second = member.tell(Lane.CLAIM, taken, Claims({9: 2}, 1, 1))[0]
    assert {first.transfer.incarnation, second.transfer.incarnation} == lost.keys()
    assert list(member.state.holdings.held) == [9]
    assert member.state.vitals().claims == 1
    # An earlier claim came to light, which the next look will hand out.
    rest = member.tell(Lane.CLAIM, Taken((Work(10, 3, ()),), 1), Claims({9: 2, 10: 3, 12: 4}, 3, 1))
    assert isinstance(rest[0], Rest)
    assert member.state.vitals().claims == 2


def looking():
    """A member that got nothing for its slot and has read the claims."""
    member = Told()
    member.tell(Lane.DECODE)
    for result in (None, False, None, ()):
        member.tell(Lane.CLAIM, result)
    return member


def test_the_news_are_read_between_the_parts_of_long_journals():
    member = looking()
    assert member.tell(Lane.CLAIM)[0] == ReadOwnUnit(cuts=False, has_cut=False)
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


def a_holder(name):
    return Holder(
        incarnation=name, lost=True, idle=False, unfinished=2, running=2, waiting=0, released=0, tokens_per_s=None,
        plateau=0,
    )  # fmt: skip
