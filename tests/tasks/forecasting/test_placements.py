"""A forecast of a trainer that is not the run's own: what is compared, what it says, and what it recommends."""

from typing import Any

import pytest

from storage import fleet_layout, records
from storage.fleet_records import FleetRecord
from storage.forecast_records import ForecastRecord, SetupForecast, Spread
from storage.seats import take_seat
from tasks.configuration.run_config import parse
from tasks.forecasting.comparison import against_other_placements, forecast, refusal
from tasks.forecasting.inputs import gather
from tasks.forecasting.probe import NoProbe
from tasks.forecasting.seated_runs import sharers_of
from tasks.forecasting.table import forecast_text
from tests.fleet_records import TTL_S, BeatingClock, a_beat, a_host, a_run
from tests.forecast_documents import document
from tests.small_run import memory_store

UNPROBED = NoProbe(reason="not asked")
FLEET, URL = "memory://forecast-fleet", "memory://forecast-runs/mine"


def made(sections: dict[str, Any], **figures: Any) -> ForecastRecord:
    """Of a crew of two spot machines, whose trainer computes for a small part of an iteration."""
    given = {"widths": [2], "train_s_per_token": 5e-4, "iterations_simulated": 6, "process_s": 20.0}
    whole = {"planning": {"seeding": "off"}, "forecast": {**document()["forecast"], **given, **figures}, **sections}
    record = forecast(parse(document(URL, **whole)), UNPROBED, created_at_s=1.0)
    assert refusal(parse(document(URL, **whole)), record.snippet) is None
    return record


def usd(setup: SetupForecast) -> float:
    assert setup.usd is not None
    return setup.usd.median


def hours(setup: SetupForecast) -> float:
    assert setup.hours is not None
    return setup.hours.median


def in_fleet(**sections: Any) -> dict[str, Any]:
    return {"trainer": {"placement": "shared", "fleet": FLEET}, **sections}


@pytest.fixture
def store():
    made = memory_store("forecast-fleet")
    rules = FleetRecord(run_prefixes=("memory://forecast-runs", "memory://runs"), host_ttl_s=TTL_S, created_at_s=0.0)
    records.put(made, fleet_layout.FLEET, rules)
    return made


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({}, None),
        ({"placement": "pod"}, "train: pod"),
        ({"placement": "shared", "fleet": "s3://b/fleet"}, "train: shared"),
    ],
)
def test_a_trainer_that_is_held_for_a_part_of_an_iteration_is_shown_with_when_its_phase_is_due(trainer, said):
    inputs = gather(parse(document(trainer=trainer, planning={"seeding": "off"})), UNPROBED)
    found = {each.name: each.value for each in inputs.shown if each.name in ("train: pod", "train: shared")}
    assert [*found] == ([] if said is None else [said])
    assert all(value.startswith("phase due when 90% of the groups are recorded") for value in found.values())
    assert (inputs.trainer.phase is None) == (said is None)
    assert [*inputs.placed] == ([] if said is None else ["own"])


def test_a_state_of_a_shared_trainer_is_switched_and_not_loaded():
    shared = {"placement": "shared", "fleet": "s3://b/fleet"}
    trainer = gather(parse(document(trainer=shared, planning={"seeding": "off"})), UNPROBED).trainer
    # Parameters and two moments of 1.2 billion, out and in at 2.5 GB/s.
    assert trainer.load_s == pytest.approx(2 * 12 * 1.2e9 / 2.5e9)


def test_where_the_configuration_does_not_say_who_shares_them_machines_are_the_runs_own():
    names = [each.name for each in made({}).setups]
    assert not any(name.endswith((", own", ", pod", ", shared")) for name in names)


def test_the_same_machines_without_seeding_are_no_other_placement():
    spread = Spread(median=1.0, low=1.0, high=1.0)
    seeds, trains_only, pod = (
        SetupForecast(name=name, settings=settings, hours=spread, usd=spread)
        for name, settings in (
            ("reserved + spot, 2", {"planning.seeding": "auto"}),
            ("spot only, 2", {"planning.seeding": "off"}),
            ("spot only, 2, pod", {"planning.seeding": "off", "trainer.placement": "pod"}),
        )
    )
    assert against_other_placements(seeds, [seeds, trains_only]) == ""
    assert against_other_placements(seeds, [seeds, trains_only, pod]).startswith("; spot only, 2, pod, ")


def test_a_pod_is_paid_for_the_phase_only_and_is_compared_with_machines_of_its_own():
    record = made({"trainer": {"placement": "pod"}})
    pod, own = record.setup("as configured"), record.setup("as configured, own")
    # An L4 at the price table's 0.8048 is paid for all hours, and by a pod for the part that its phases take.
    trainer_usd = usd(own) - own.usd_parts["requests and egress"]
    assert usd(pod) < usd(own)
    assert trainer_usd > hours(own) * 0.8048
    assert hours(pod) > hours(own)
    assert pod.sharing is None
    assert "no run waits for another" in next(each.value for each in record.inputs if each.name == "train: pod")
    assert f"; {record.recommended}, own, " in record.reason or record.recommended.endswith(", own")


def test_runs_that_share_a_trainer_are_declared_and_what_needs_a_fleet_is_not_recommended_without():
    record = made({}, runs_per_trainer=3)
    shared, own = record.setup("as configured, shared"), record.setup("as configured")
    assert shared.sharing is not None
    assert (shared.sharing.runs, own.sharing) == (3, None)
    # One L4 for the trainer and two for the crew.
    assert shared.sharing.saving_max == pytest.approx(2 / 3 * 1 / 3)
    assert usd(shared) < usd(own)
    # Not less than what the bound leaves, whatever the pools cost: here the trainer costs twice as much as a member.
    assert usd(shared) >= usd(own) * (1 - 2 / 3 * 0.8048 / (0.8048 + 2 * 0.39)) * 0.97
    assert not record.recommended.endswith(", shared")
    assert "Sharing saves at most 22.2 % of all GPU-hours" in record.reason
    text = " ".join(forecast_text(record).split())
    assert "saves at most" in text
    assert "train: switch" in text


def test_where_sharing_can_save_little_it_says_so_and_recommends_machines_of_its_own():
    record = made(
        in_fleet(pools={**document()["pools"], "rollout": {"machine": "g6.xlarge", "count": 30, "gpus": 1}}),
        runs_per_trainer=2,
        widths=[30],
    )
    assert record.recommended.endswith(", own")
    assert record.snippet["trainer.placement"] == "own"
    assert record.snippet["trainer.fleet"] is None
    assert "Do not share: it saves at most 1.6 % of all GPU-hours" in record.reason


@pytest.mark.parametrize(("ranks", "nodes", "is_compared"), [(1, 1, False), (2, 1, True), (2, 2, False)])
def test_what_cannot_share_is_not_compared(ranks, nodes, is_compared):
    """A host is one machine, and a run has a rank for each of its devices."""
    two = {"pools": {**document()["pools"], "train": {"machine": "p4d.24xlarge", "gpus": 2}}}
    trainer = {"nproc_per_node": ranks, "nnodes": nodes}
    names = [each.name for each in made({**two, "trainer": trainer}, runs_per_trainer=3).setups]
    assert "as configured, pod" in names
    assert ("as configured, shared" in names) == is_compared


def test_a_run_of_a_fleet_is_forecast_beside_those_that_are_seated_with_it(store):
    host = a_host("host", 1 << 40)
    records.put(store, fleet_layout.host("host"), host)
    records.put(store, fleet_layout.alive("host"), a_beat("host", 0, "gone"))
    for name in ("b", "c"):
        records.put(store, fleet_layout.admitted(a_run(name).id), a_run(name, phase_s=20.0, cycle_s=100.0))
        take_seat(store, a_run(name).id, 0, "host")
    record = made(in_fleet())
    sharing = record.setup("as configured").sharing
    assert sharing is not None
    assert sharing.runs == 3
    assert sharing.slowdown > 1
    assert record.setup("as configured, own").sharing is None


@pytest.mark.parametrize("are_there", [True, False])
def test_a_run_of_several_ranks_is_forecast_beside_runs_of_as_many(store, are_there):
    for name, ranks in (("one", 1), ("two", 2)):
        if are_there:
            records.put(store, fleet_layout.host(name), a_host(name, 1 << 40, devices=ranks))
            records.put(store, fleet_layout.alive(name), a_beat(name, 0))
        # The host with one device has the least to do.
        run = a_run(f"of-{name}", ranks=ranks, phase_s=5.0 * ranks)
        records.put(store, fleet_layout.admitted(run.id), run)
        take_seat(store, run.id, 0, name)
    clock = BeatingClock(store, {"one": "idle", "two": "idle"} if are_there else {})
    wide = {**document()["pools"], "train": {"machine": "p4d.24xlarge", "gpus": 2}}
    trainer = {"placement": "shared", "fleet": FLEET, "nproc_per_node": 2}
    found = sharers_of(parse(document(URL, trainer=trainer, pools=wide, planning={"seeding": "off"})), clock)
    assert found is not None
    assert [run.ranks for run in found.others] == [2]


def test_a_run_alone_in_its_fleet_pays_a_host_as_it_pays_its_own(store):
    record = made(in_fleet())
    shared, own = record.setup("as configured"), record.setup("as configured, own")
    assert shared.sharing is not None
    assert (shared.sharing.runs, shared.sharing.saving_max) == (1, 0.0)
    assert usd(shared) / hours(shared) == pytest.approx(usd(own) / hours(own), rel=0.05)
    assert record.recommended.endswith(", own")


def test_a_fleet_that_is_not_there_is_named():
    with pytest.raises(LookupError, match="holds no fleet; make one by: gleaner fleet init"):
        made(in_fleet(trainer={"placement": "shared", "fleet": "memory://no-fleet-here"}))
