import math

import pytest

from storage.fleet import fleet_layout
from storage.fleet.fleet_records import AdmittedRun, FleetRecord
from storage.records import records
from storage.stores.store import CorruptObject
from tests.fleet_records import FLEET, a_run


def test_the_id_of_a_run_is_that_of_its_url():
    run = a_run("a")
    assert run.id == fleet_layout.run_id("memory://runs/a") != fleet_layout.run_id("memory://runs/b")
    assert len(run.id) == fleet_layout.RUN_ID_DIGITS


@pytest.mark.parametrize("url", ["memory://runs", "memory://runs/a", "memory://runs/a/b"])
def test_a_run_below_a_prefix_is_allowed(url):
    assert FLEET.allows(url)


@pytest.mark.parametrize("url", ["memory://other/a", "memory://runs-of-others/a", "memory://runs/../x", "s3://runs/a"])
def test_a_run_elsewhere_is_not_allowed(url):
    assert not FLEET.allows(url)


def test_a_prefix_may_end_with_a_slash():
    fleet = FleetRecord(run_prefixes=("s3://b/team/",), host_ttl_s=30.0, created_at_s=0.0)
    assert fleet.allows("s3://b/team/x")
    assert not fleet.allows("s3://b/teams/x")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("phase_s", 0.0),
        ("cycle_s", -1.0),
        ("share", 0.0),
        ("share", math.inf),
        ("phase_s", math.nan),
        ("state_bytes", -1),
    ],
)
def test_a_run_that_cannot_be_calculated_with_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}: value"):
        a_run("a", **{field: value})


def test_the_stored_record_of_such_a_run_is_corrupt():
    key = fleet_layout.admitted("x")
    body = records.encode(key, a_run("a", share=2.0))
    record = records.decode(AdmittedRun, key, body)
    object.__setattr__(record, "share", 0.0)
    with pytest.raises(CorruptObject, match="share"):
        records.decode(AdmittedRun, key, records.encode(key, record))


def test_load_and_waiting_follow_from_the_expected_times():
    run = a_run("a", phase_s=60.0, cycle_s=600.0)
    assert run.load == 0.1
    assert math.isclose(run.wait_s_max(1.1), 60.0)
