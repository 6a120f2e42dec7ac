"""A standing trainer as a user runs it: `pyflyte run`, and one process that trains all iterations."""

import itertools

import pytest

from storage.fleet import fleet_layout
from storage.fleet.fleet_reading import FleetReader
from storage.fleet.fleet_records import FleetRecord
from storage.records import records
from storage.records.run import reports
from storage.stores.connect import connect
from tests.processes import wait_until
from tests.served_fleet import states
from tests.whole_runs import ONE_SLOT, config_file, train_here

pytestmark = pytest.mark.slow
SECTIONS = {
    "rollout": {"engine": "scripted"},
    "pools": ONE_SLOT,
    "planning": {"seeding": "off"},
    "algorithm": {"old_logprobs": "trainer", "micro_batch_order": "plan"},
    "retention": {"keep_weights": 9, "keep_checkpoints": 9},
}


def test_it_ends_with_the_bits_of_a_train_task_in_each_iteration_and_restores_once(tmp_path, model):
    url = {placement: str(tmp_path / placement) for placement in ("own", "standing")}
    for placement, of_it in url.items():
        sections = SECTIONS | {"trainer": {"placement": placement}}
        train_here(config_file(tmp_path / "given", model, of_it, **sections), "--count", "3")
    assert states(url["standing"]) == states(url["own"])
    store = connect(fleet_layout.standing(url["standing"]))
    reader = FleetReader(store, records.read(store, FleetRecord, fleet_layout.FLEET))
    [host] = reader.hosts()
    # It writes the last checkpoint beside what follows the weights.
    wait_until(lambda: reader.beat(host.incarnation).state == "gone")
    restored = [each for record in reader.spent(host.incarnation) for each in record.restored]
    assert [each.iteration for each in restored if each.tier == "object store"] == [0]
    history = reports(connect(url["standing"]))
    assert [report.metrics["sharing/warm"] for report in history][1:] == [1.0, 1.0]
    # Its machine is paid for between two phases, too.
    for before, report in itertools.pairwise(history):
        stood_s = report.metrics["timing_s/stood"]
        assert stood_s == pytest.approx(report.train_started_at_s - before.train_ended_at_s, abs=0.5)
        assert stood_s > 0


def test_a_run_may_change_between_a_trainer_of_each_iteration_and_one_that_stands(tmp_path, model):
    urls = [str(tmp_path / name) for name in ("changing", "own")]
    for url, placements in zip(urls, (("own", "standing", "own"), ("own",) * 3), strict=True):
        for placement in placements:
            sections = SECTIONS | {"trainer": {"placement": placement}}
            train_here(config_file(tmp_path / "given", model, url, **sections), "--count", "1")
    assert states(urls[0]) == states(urls[1])
