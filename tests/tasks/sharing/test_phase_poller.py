import pytest

from storage.fleet.fleet_records import DueRecord
from storage.fleet.phase_failure import fail_phase, phase_failure
from storage.package_version import VERSION
from storage.records import layout, records
from storage.records.records import RunRecord, SettingsRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from tasks.sharing.phase_poller import PhasePoller
from tests.fleet_records import a_run

RUN = RunRecord(config={}, digest="0" * 32, vocab_size=1, model_files={}, created_at_s=0.0)


class Counting(MemoryStore):
    """Counts its requests."""

    gets = 0

    def get(self, key, start=0, end=None):
        self.gets += 1
        return super().get(key, start, end)


@pytest.fixture
def store():
    return Counting()


@pytest.fixture
def view(store):
    return PhasePoller(a_run("a"), lambda _: store)


def mark_due(store, iteration):
    records.put(store, layout.due(iteration), DueRecord(iteration=iteration, groups=1))


def publish(store, iteration):
    store.put(layout.manifest(layout.weights(iteration + 1)), b"m")


def test_a_run_that_does_not_exist_yet_is_waited_for(store, view):
    assert view.due() is None
    records.put(store, layout.RUN, RUN)
    assert view.due() is None
    mark_due(store, 0)
    assert view.due() == 0


def test_a_phase_is_due_until_it_is_published_and_then_the_next_is_waited_for(store, view):
    records.put(store, layout.RUN, RUN)
    mark_due(store, 0)
    assert (view.due(), view.due()) == (0, 0)
    publish(store, 0)
    assert view.due() is None
    mark_due(store, 1)
    assert view.due() == 1


def test_a_poll_costs_one_request_while_nothing_is_due(store, view):
    records.put(store, layout.RUN, RUN)
    view.due()
    before = store.gets
    for _ in range(5):
        view.due()
    assert store.gets == before + 5


def test_a_view_that_begins_late_or_is_old_finds_the_present_iteration(store, view):
    records.put(store, layout.RUN, RUN)
    mark_due(store, 0)
    assert view.due() == 0
    # Many iterations later the weights are gone, and the reports are there.
    for iteration in range(9):
        mark_due(store, iteration)
        store.put(layout.report(iteration), b"r")
    publish(store, 8)
    mark_due(store, 9)
    assert view.due() == 9
    assert PhasePoller(a_run("a"), lambda _: store).due() == 9


def test_a_run_without_a_report_in_the_middle_does_not_hold_the_host_for_ever(store, view):
    records.put(store, layout.RUN, RUN)
    view.due()
    for iteration in (0, 1):
        mark_due(store, iteration)
    store.put(layout.report(0), b"r")
    store.delete(layout.report(0))
    store.put(layout.report(1), b"r")
    publish(store, 0)
    assert view.due() is None


def test_damaged_records_are_refused(store, view):
    records.put(store, layout.RUN, RUN)
    store.put(layout.due(0), b"garbage")
    with pytest.raises(CorruptObject):
        view.due()
    records.put(store, layout.due(0), DueRecord(iteration=1, groups=1))
    with pytest.raises(CorruptObject, match="iteration 1"):
        view.due()


def test_a_phase_that_another_version_has_recorded_fails_by_name_and_is_not_begun(store, view):
    records.put(store, layout.RUN, RUN)
    records.put(store, layout.due(0), DueRecord(iteration=0, groups=1, version="0.0.9"))
    assert (view.due(), view.due()) == (None, None)
    assert phase_failure(store, 0) == (
        f"its host has Gleaner {VERSION}, the run 0.0.9; allowed: the same; end the host and start one of 0.0.9"
    )


def test_a_phase_that_has_failed_for_good_is_due_again_in_another_execution(store, view):
    records.put(store, layout.RUN, RUN)
    records.put(store, layout.settings(0), SettingsRecord(config={}, execution="first"))
    mark_due(store, 0)
    assert view.due() == 0
    fail_phase(store, 0, "it broke")
    assert (view.due(), view.due()) == (None, None)
    records.put(store, layout.settings(0), SettingsRecord(config={}, execution="second"))
    assert (phase_failure(store, 0), view.due()) == (None, 0)
