import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.crew_model.accounts import Account, Life, mean_members
from tasks.crew_model.flush_interval import GETS_PER_FLUSH


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(0, 10**6), st.floats(0, 1)), max_size=5))
def test_decoding_is_divided_by_what_became_of_the_tokens(lives):
    account = Account("rollout", 3.6, 1.0, put_usd=0.5, get_usd=0.25)
    for decode_s, decoded, share in lives:
        account.lives.append(Life(began_s=0.0, decode_s=decode_s, decoded=decoded, wasted=share * decoded))
    account.add("idle", 7.0)
    account.close(1e4, 5.0, 5.0)
    assert account.machine_s == pytest.approx(7.0 + sum(decode_s for decode_s, _, _ in lives))
    assert account.seconds["wasted"] == pytest.approx(sum(s * share for s, decoded, share in lives if decoded))
    assert sum(account.usd().values()) == pytest.approx(
        account.machine_s * 0.001 + account.puts * 0.5 + account.gets * 0.25
    )


def test_requests_are_counted_by_life():
    account = Account("rollout", 3.6, 1.0, egress_usd_per_gb=0.5)
    account.lives.append(Life(began_s=10.0, ended_s=110.0, decode_s=50.0, looks=7))
    account.bytes_read = 4e9
    account.close(1000.0, 5.0, 10.0)
    assert (account.puts, account.gets) == (10 + 10, 10 * GETS_PER_FLUSH + 7)
    assert account.usd()["egress"] == 2.0


def test_members_are_counted_while_they_have_the_weights():
    lives = [Life(began_s=0, worked_s=5.0, ended_s=10.0), Life(began_s=0, worked_s=0.0), Life(began_s=0)]
    assert mean_members(lives, 0.0, 20.0) == (5 + 20) / 20
    assert mean_members(lives, 5.0, 5.0) == 0.0


def test_more_waste_than_tokens_is_a_broken_invariant():
    account = Account("rollout", 1.0, 1.0)
    account.lives.append(Life(began_s=0.0, worked_s=1.0, decode_s=10.0, decoded=100.0, wasted=101.0))
    with pytest.raises(AssertionError, match="more was wasted than decoded"):
        account.close(20.0, 2.0, 4.0)


def test_negative_seconds_are_a_broken_invariant():
    account = Account("rollout", 1.0, 1.0)
    account.add("idle", -1.0)
    with pytest.raises(AssertionError, match="negative seconds"):
        account.close(20.0, 2.0, 4.0)
