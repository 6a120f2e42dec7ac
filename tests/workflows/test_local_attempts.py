"""A node that runs on this machine gets the attempts that Flyte would give it."""

import logging

import pytest
from flytekit import task, workflow
from flytekit.exceptions.user import FlyteRecoverableException

from resources.pools import PoolsConfig
from storage.stores.store import StoreDenied
from workflows.local_attempts import built_on

POOLS = PoolsConfig()
RETRIES = POOLS.named("control").retries
PAUSES: list[float] = []
ATTEMPTS: list[Exception] = []


@task
def fragile(number: int) -> int:
    if ATTEMPTS:
        raise ATTEMPTS.pop()
    return number + 1


@workflow
def chain(number: int) -> int:
    """Two nodes, as plan and train are."""
    first = built_on(fragile, POOLS, "control", PAUSES.append)(number=number).with_overrides(name="first")
    second: int = built_on(fragile, POOLS, "control", PAUSES.append)(number=first).with_overrides(name="second")
    return second


@pytest.fixture(autouse=True)
def fresh() -> None:
    ATTEMPTS.clear()
    PAUSES.clear()


def outages(count: int) -> list[Exception]:
    return [FlyteRecoverableException(f"the store does not answer, {number}") for number in range(count)]


@pytest.mark.parametrize("count", range(RETRIES + 1))
def test_an_outage_costs_attempts_and_not_the_command(count, caplog):
    ATTEMPTS.extend(outages(count))
    with caplog.at_level(logging.WARNING):
        assert chain(number=1) == 3
    assert ATTEMPTS == []
    assert [5.0 * 2**number for number in range(count)] == PAUSES
    assert caplog.text.count(f"of {RETRIES + 1} failed; the next one begins in ") == count


def test_an_outage_of_half_a_minute_is_outlasted():
    """Even of a store that refuses at once, as a directory that is not mounted does."""
    ATTEMPTS.extend(outages(RETRIES))
    chain(number=1)
    assert sum(PAUSES) >= 30


def test_an_outage_without_an_end_ends_the_command_with_its_error():
    ATTEMPTS.extend(outages(100))
    with pytest.raises(FlyteRecoverableException, match="the store does not answer"):
        chain(number=1)
    assert len(ATTEMPTS) == 100 - (RETRIES + 1)


def test_what_flyte_would_not_try_again_is_not_tried_again_here():
    ATTEMPTS.extend([StoreDenied("refused"), StoreDenied("refused")])
    with pytest.raises(StoreDenied):
        chain(number=1)
    assert len(ATTEMPTS) == 1
