"""A fleet's account: what each run paid, what it would have paid alone, and the bound on what sharing saves."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.fleet.fleet_records import HostRecord, Prediction
from storage.fleet.spent_records import RestoredState, SpentEntry, SpentRecord
from tasks.sharing.fleet_ledger import (
    FleetReport,
    TierAccount,
    bound_of,
    host_account,
    measured_cycle_s,
    predicted_slowdowns,
    run_account,
    tier_accounts,
)
from tests.fleet_records import a_beat, a_run

RUNS = {name: a_run(name, share=share, cycle_s=360.0) for name, share in (("a", 1.0), ("b", 3.0))}
SHARES = {run.id: run.share for run in RUNS.values()}
A, B = RUNS["a"], RUNS["b"]
STRETCHES = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.floats(0.1, 1e4)), max_size=20)


def a_host(usd_per_hour=2.0, name="h"):
    return HostRecord(incarnation=name, machine="m", memory_bytes=1, usd_per_hour=usd_per_hour, began_at_s=0.0)


def restored(run, tier, ahead=False):
    return RestoredState(run=run.id, iteration=1, tier=tier, ahead=ahead, seconds=1.5, num_bytes=10)


def spent(stretches, seated=(A, B), states=()):
    entries, now_s = [], 0.0
    for name, seconds in stretches:
        run = None if name is None else RUNS[name].id
        ended_s = now_s + seconds
        entries.append(
            SpentEntry(
                kind="idle" if run is None else "train",
                run=run,
                iteration=None if run is None else 0,
                began_s=now_s,
                ended_s=ended_s,
            )
        )
        now_s = ended_s
    ids = tuple(sorted(run.id for run in seated))
    record = SpentRecord(host="h", sequence=0, entries=tuple(entries), seated=ids, restored=tuple(states))
    return [record] if entries else []


def reports(*moments):
    return [SimpleNamespace(created_at_s=moment, metrics={"timing_s/iteration": 500.0}) for moment in moments]


@given(many=st.lists(STRETCHES, min_size=1, max_size=4), usd_per_hour=st.floats(0.0, 100.0), seated=st.booleans())
def test_the_parts_of_all_runs_add_up_to_the_hosts_bills(many, usd_per_hour, seated):
    hosts = [
        host_account(a_host(usd_per_hour), None, spent(stretches, (A, B) if seated else ()), SHARES)
        for stretches in many
    ]
    for host, stretches in zip(hosts, many, strict=True):
        lived_h = math.fsum(seconds for _, seconds in stretches) / 3600.0
        assert math.isclose(host.hours, lived_h, rel_tol=0.0, abs_tol=1e-9)
        parts = math.fsum(host.usd_of(run) for run in host.run_hours)
        assert math.isclose(parts, host.usd, rel_tol=0.0, abs_tol=1e-9 * max(1.0, usd_per_hour))
    accounts = [run_account(run, run.id, hosts, None) for run in RUNS.values()]
    unpaid_h = math.fsum(host.run_hours.get(None, 0.0) for host in hosts)
    hours = math.fsum(host.hours for host in hosts)
    assert math.isclose(math.fsum(each.hours for each in accounts) + unpaid_h, hours, rel_tol=0.0, abs_tol=1e-9)


def test_an_account_by_hand():
    """Of two hours a trains for one, and of the other, idle one b pays three quarters."""
    states = [
        restored(A, "object store"),
        restored(A, "local disk", ahead=True),
        restored(A, "host memory"),
        restored(B, "host memory"),
    ]
    host = host_account(a_host(), a_beat("h", 3, "gone"), spent([("a", 3600.0), (None, 3600.0)], states=states), SHARES)
    assert (host.hours, host.usd, host.is_gone) == (2.0, 4.0, True)
    found = run_account(A, "a", [host], reports(0.0, 396.0, 792.0, 5000.0))
    assert (found.hours, found.usd) == (1.25, 2.5)
    assert (found.iterations, found.isolated_hours) == (4, 0.4)
    assert found.slowdown == pytest.approx(1.1)
    assert (found.warm, found.phases) == (1, 2)
    assert tier_accounts(host.restored) == [
        TierAccount(tier="host memory", phases=2, ahead=0, seconds=3.0, num_bytes=20),
        TierAccount(tier="local disk", phases=0, ahead=1, seconds=1.5, num_bytes=10),
        TierAccount(tier="object store", phases=1, ahead=0, seconds=1.5, num_bytes=10),
    ]
    assert run_account(B, "b", [host], []).hours == 0.75


def test_a_second_of_a_host_is_one_second_of_each_of_its_devices():
    host = host_account(a_host(), None, spent([("a", 3600.0)]), SHARES)
    found = run_account(replace(A, ranks=8), "a", [host], reports(0.0, 360.0))
    assert (found.hours, found.usd, found.isolated_hours) == (1.0, 2.0, 0.2)
    assert (found.device_hours_per_step, found.isolated_device_hours_per_step) == (4.0, pytest.approx(0.8))
    unknown = run_account(A, "a", [host], None)
    assert (unknown.device_hours_per_step, unknown.isolated_device_hours_per_step) == (None, None)


def test_of_several_admissions_that_concern_a_run_the_last_one_says_what_was_expected():
    first = replace(A, admitted_at_s=1.0, predicted=Prediction(host="h", slowdowns={A.id: 1.0}))
    last = replace(B, admitted_at_s=2.0, predicted=Prediction(host="h", slowdowns={A.id: 1.05, B.id: 1.02}))
    found = predicted_slowdowns([last, first, a_run("c")])
    assert found == {A.id: 1.05, B.id: 1.02}
    assert run_account(A, "a", [], [], found[A.id]).predicted == 1.05


def test_what_is_not_known_is_said_to_be_so():
    unpriced = host_account(a_host(None), None, spent([("a", 3600.0)]), SHARES)
    found = run_account(A, "a", [unpriced], None)
    assert (found.hours, found.usd, found.iterations, found.slowdown) == (1.0, None, None, None)
    assert run_account(B, "b", [unpriced], []).usd == 0.0
    assert run_account(A, "a", [], reports(7.0)).slowdown is None


def test_a_cycle_is_measured_between_reports_if_there_are_two():
    assert measured_cycle_s([]) is None
    assert measured_cycle_s(reports(7.0)) == 500.0
    assert measured_cycle_s(reports(0.0, 100.0, 210.0, 9000.0)) == 110.0


@pytest.mark.parametrize(
    ("gpus", "runs", "hosts", "bound", "said"),
    [
        ((1, 1), 2, 1, 0.25, "Sharing saves at most 25.0 % of all GPU-hours."),
        ((16, 1), 2, 1, 1 / 34, "Do not share: it saves at most 2.9 % of all GPU-hours."),
        ((1, 1), 2, 2, 0.0, "Do not share: it saves at most 0.0 % of all GPU-hours."),
        (
            (8, 0),
            2,
            1,
            None,
            "The bound on what sharing saves is unknown, because no run has GPUs in its configuration.",
        ),
    ],
)
def test_the_bound_and_what_it_means(gpus, runs, hosts, bound, said):
    admitted = [a_run(str(each), rollout_gpus=gpus[0], trainer_gpus=gpus[1]) for each in range(runs)]
    found = bound_of(admitted, hosts)
    assert found == (None if bound is None else pytest.approx(bound))
    assert FleetReport(url="u", bound=found, hosts=[], runs=[]).verdict == said
