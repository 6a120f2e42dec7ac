"""A program that trains for a Flyte execution: the execution plans, records and concludes."""

import json
import time

import pytest

import gleaner
from storage.clock import SystemClock
from storage.records import layout
from storage.records.run import RunBusy
from storage.stores.connect import connect
from tasks.external.plans import FollowedPlans, NoPlan, WrongStep
from tasks.learning.collecting import NoHost, _sign_of_host, collect_and_wait
from tests.external_program import SECTIONS, arrays, seen, settings, trained, versions
from tests.served_fleet import in_thread
from tests.small_run import EXECUTION, commit_iteration, plan_iteration, roll_out

KEPT = {"retention": {"keep_weights": 9}}
STEPS = 2


def execute(given):
    """What the nodes plan, train and conclude of the execution do, with a crew that is undisturbed."""
    url = given.run.url
    for step in range(STEPS):
        plan_iteration(given, SystemClock())
        roll_out(url, step)
        collect_and_wait(url, step, EXECUTION, SystemClock())
        commit_iteration(url, step)


def execute_one(given):
    collect_and_wait(given.run.url, 0, EXECUTION, SystemClock())
    commit_iteration(given.run.url, 0)


def follow(url, steps):
    with gleaner.rollouts(url) as rollouts:
        found = {}
        for step in range(rollouts.step, steps):
            groups = list(rollouts.next(step))
            found[step] = seen(groups)
            rollouts.publish(trained(arrays(url, step), groups))
        return found


def test_the_program_gets_the_groups_of_an_execution_and_publishes_for_it(tmp_path, model):
    given = settings(str(tmp_path / "run"), model, **KEPT)
    plan_iteration(given, SystemClock())
    execution = in_thread(execute, given)
    first = follow(given.run.url, 1)
    # The program ends, and begins again.
    rest = follow(given.run.url, STEPS)
    execution()
    assert [*first, *rest] == [0, 1]
    run = gleaner.open(given.run.url)
    assert list(run.iterations) == [0, 1]
    assert len(versions(given.run.url)) == STEPS + 1
    assert connect(given.run.url).get(layout.EXTERNAL_BEAT)


def test_each_waits_for_the_other_and_says_in_the_end_what_is_missing(tmp_path, model):
    given = settings(str(tmp_path / "run"), model, trainer={**SECTIONS["trainer"], "group_timeout_s": 0.6})
    plan_iteration(given, SystemClock())
    roll_out(given.run.url, 0)
    with pytest.raises(NoHost, match=r"waits for the program that trains, .* for 1 s; .* gleaner\.rollouts\("):
        collect_and_wait(given.run.url, 0, EXECUTION, SystemClock())
    with gleaner.rollouts(given.run.url) as rollouts:
        began_s = time.monotonic()
        with pytest.raises(NoPlan, match=r"step 1 of .* is not planned, and no execution"):
            rollouts.next(1)
        assert time.monotonic() - began_s > 0.5
        with pytest.raises(WrongStep, match=r"^step: value -1; allowed: at least 0$"):
            rollouts.next(-1)


def test_of_a_sign_of_life_no_more_is_read_than_one_has(tmp_path, model):
    given = settings(str(tmp_path / "run"), model)
    connect(given.run.url).put(layout.EXTERNAL_BEAT, bytes(1 << 20))
    connect(given.run.url).put(layout.LEASE_BEAT, bytes(1 << 20))
    assert len(_sign_of_host(given)) == layout.BEAT_BYTES_MAX
    follower = FollowedPlans(connect(given.run.url), given, SystemClock())
    assert len(follower._sign(layout.LEASE_BEAT)) == layout.BEAT_BYTES_MAX


def test_of_two_programs_the_later_one_goes_on(tmp_path, model):
    given = settings(str(tmp_path / "run"), model, trainer={**SECTIONS["trainer"], "group_timeout_s": 2.0})
    plan_iteration(given, SystemClock())
    roll_out(given.run.url, 0)
    execution = in_thread(execute_one, given)
    with gleaner.rollouts(given.run.url) as first:
        taken = list(first.next(0))
        with gleaner.rollouts(given.run.url) as second:
            again = list(second.next(0))
            assert seen(again) == seen(taken)
            until_s = time.monotonic() + 20
            while not first._plans._successor and time.monotonic() < until_s:
                time.sleep(0.02)
            for call in (lambda: first.next(1), lambda: first.publish(None)):
                with pytest.raises(RunBusy, match=r"is trained by a program that began later .* allowed: one program"):
                    call()
            assert second.publish(trained(arrays(given.run.url, 0), again))
    execution()
    with first:
        assert seen(first.next(0)) == seen(taken)


def test_a_late_write_of_a_sign_of_life_is_no_later_program(tmp_path, model):
    given = settings(str(tmp_path / "run"), model, trainer={**SECTIONS["trainer"], "group_timeout_s": 0.5})
    plan_iteration(given, SystemClock())
    store = connect(given.run.url)

    def sign_of(program, number):
        store.put(
            layout.EXTERNAL_BEAT, json.dumps({"at_s": number, "program": program}, separators=(",", ":")).encode()
        )

    sign_of("earlier", 1)
    with gleaner.rollouts(given.run.url) as rollouts:
        rollouts.next(0)
        until_s = time.monotonic() + 20
        for number in (2, 3):
            while b"earlier" in rollouts._plans._sign(layout.EXTERNAL_BEAT) and time.monotonic() < until_s:
                time.sleep(0.02)
            own = rollouts._plans._sign(layout.EXTERNAL_BEAT)
            assert own.startswith(b'{"at_s":')
            assert b"earlier" not in own
            sign_of("earlier", number)
        store.put(layout.EXTERNAL_BEAT, own)
        time.sleep(0.3)
        rollouts.next(0)
        sign_of("later", 4)
        while not rollouts._plans._successor and time.monotonic() < until_s:
            time.sleep(0.02)
        with pytest.raises(RunBusy, match=r'began later .*"later"'):
            rollouts.next(0)


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(LookupError, match="holds no run"):
        gleaner.rollouts(str(tmp_path))
