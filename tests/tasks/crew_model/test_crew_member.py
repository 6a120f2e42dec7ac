import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.crew_model.accounts import Account
from tasks.crew_model.crew_member import EngineModel, ModelMember
from tasks.crew_model.step_time import StepTime
from tasks.planning.makespan import member_time_s

STEP = StepTime(((1, 0.1), (2, 0.1), (8, 0.4)))


def a_member(responses_max: int = 8, batch_max: int | None = None) -> ModelMember:
    engine = EngineModel.of(STEP, responses_max, 1000.0)
    account = Account("rollout", 3.6, 1.0)
    member = ModelMember("0-1", 0, engine, account, now_s=0.0, batch_max=batch_max, weight=1.0, phase_s=0.0)
    member.work(0.0)
    return member


def run_out(member: ModelMember) -> list[tuple[float, int]]:
    found = []
    while (next_s := member.next_end_s()) is not None:
        member.advance(next_s)
        found += [(next_s, response) for response in member.ended()]
    return found


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_lockstep_takes_the_identity_of_the_step_time(lengths):
    member = a_member()
    for response, length in enumerate(lengths):
        member.start(response, length, 0, 0, 0.0)
    found = run_out(member)
    assert found[-1][0] == pytest.approx(member_time_s(sorted(lengths, reverse=True), STEP, 8))
    assert [lengths[response] for _, response in found] == sorted(lengths)
    assert member.life.decode_s == pytest.approx(found[-1][0])


def test_a_prompt_is_computed_once_and_everybody_waits_for_it():
    member = a_member()
    member.start(0, 10.0, 0, 100, 0.0)
    member.start(1, 10.0, 0, 100, 0.0)
    member.start(2, 10.0, 1, 100, 50.0)
    assert member.next_end_s() == pytest.approx(0.25 + 10 * STEP.step_s(3))
    member.advance(0.2)
    assert member.decoded(0) == 0
    run_out(member)
    assert member.account.seconds["prefill"] == pytest.approx(0.25)
    assert member.life.prefill_tokens == 250


def test_what_was_dropped_and_comes_back_ends_when_it_is_due():
    member = a_member()
    member.start(0, 10.0, 0, 0, 0.0)
    member.advance(0.5)
    member.drop([0])
    assert member.next_end_s() is None
    member.start(0, 20.0, 0, 0, 0.0)
    assert run_out(member) == [(pytest.approx(2.5), 0)]


def test_tokens_since_the_last_flush_are_told_apart():
    member = a_member()
    member.start(0, 100.0, 0, 0, 0.0)
    member.advance(7.0)
    assert member.flushed(0, 5.0) == pytest.approx((50.0, 20.0))
    member.start(1, 100.0, 0, 0, 0.0)
    assert member.flushed(1, 5.0) == (0.0, 0.0)


def test_the_plans_batch_holds_while_any_of_its_own_is_left():
    member = a_member(batch_max=2)
    member.own = {0}
    assert (member.batch_limit, member.room, member.isolated) == (2, 2, True)
    member.own.clear()
    assert (member.batch_limit, member.room, member.isolated) == (8, 8, False)
