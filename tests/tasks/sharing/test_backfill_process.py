"""A real member generates on a host for one run until another run's phase is due; no token is lost or doubled."""

import itertools
import time

import pytest

from storage.clock import SystemClock
from storage.fleet import fleet_layout
from storage.journal.assembly import JournalReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.run import read_plan
from storage.stores.connect import connect
from tasks.sharing.billing import bill, total_s
from tests.served_fleet import LIMIT_S, a_shared_run, alone, begin, make_fleet, serving, spent_by, states
from tests.small_run import commit_iteration, plan_iteration

pytestmark = pytest.mark.slow
# A response takes up to six seconds, and no phase is expected for a quarter of an hour.
PACED = {"rollout": {"scripted_step_s": 0.15, "flush_interval_s": 0.1}}
CYCLE_S = 1000.0


def until(is_so):
    limit_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < limit_s
        time.sleep(0.02)


def members(url):
    store = connect(url)
    return [records.read(store, HeartbeatRecord, key) for key in store.list(layout.alive_all(0))]


def journalled(url):
    """How many tokens of the iteration count."""
    store = connect(url)
    plan = read_plan(store, 0)
    reader = JournalReader(store, plan)
    reader.refresh()
    return sum(len(reader.assemble(response).token_ids) for response in range(plan.num_responses))


def test_a_member_helps_one_run_leaves_for_the_phase_of_another_and_its_tokens_stay(tmp_path, model):
    fleet = make_fleet(tmp_path)
    a = a_shared_run(tmp_path, fleet, model, "a", CYCLE_S, **PACED)
    b = a_shared_run(tmp_path, fleet, model, "b", CYCLE_S)
    plan_iteration(a, SystemClock())
    a_id, b_id = (fleet_layout.run_id(each.run.url) for each in (a, b))
    with serving(fleet, "host", backfill_s=0.5):
        until(lambda: any(each.tokens_generated for each in members(a.run.url)))
        begin(b, 0)()
        [first] = [each for each in members(a.run.url) if each.state == "gone"]
        # What it had generated when it left counts; another member may have gone on since.
        assert 0 < first.tokens_generated <= journalled(a.run.url)
        commit_iteration(b.run.url, 0)
        # The crew of a and perhaps another member finish what the first has begun.
        begin(a, 0)()
        # It verifies that every token of the journal was trained exactly once.
        report = commit_iteration(a.run.url, 0)
    assert report.metrics["resume/tokens_recovered"] >= 1
    assert states(a.run.url) == alone(model, 1)
    assert states(b.run.url) == alone(model, 1)
    spent = spent_by(fleet, "host")
    entries = [entry for record in spent for entry in record.entries]
    assert all(left.ended_s == right.began_s for left, right in itertools.pairwise(entries))
    helped = [entry for entry in entries if entry.kind == "backfill"]
    assert {entry.run for entry in helped} == {a_id}
    [began_s] = [entry.began_s for entry in entries if entry.kind == "switch" and entry.run == b_id][:1]
    assert helped[0].began_s < began_s
    assert not any(entry.began_s < began_s < entry.ended_s for entry in helped)
    billed = bill(spent, 0.0, {a_id: 1.0, b_id: 1.0})
    assert total_s(billed) == pytest.approx(entries[-1].ended_s, abs=1e-9)
    assert billed[a_id]["backfill"] == pytest.approx(sum(entry.seconds for entry in helped), abs=1e-9)
    assert "backfill" not in billed[b_id]
