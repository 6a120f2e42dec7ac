import threading

import pytest

from storage.clock import ManualClock
from storage.records import layout, records, run
from storage.records.records import ReportRecord
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing
from tests.journals import a_plan


def open_(store, config, digest="d", model_files=None):
    return run.open_run(
        store,
        config=config,
        digest=digest,
        vocab_size=5,
        model_files=model_files or {},
        clock=ManualClock(),
        explain=lambda stored: [f"seed: {config['seed']} here, {stored['seed']} there"],
    )


def commit_report(store, iteration):
    report = ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=0,
        metrics={},
        rewards=(),
        lengths=(),
        lives=(),
        train_started_at_s=0,
        train_ended_at_s=0,
        created_at_s=0,
    )
    assert records.commit(store, layout.report(iteration), report)


def test_a_run_opens_once_and_continues_with_the_same_configuration():
    store = MemoryStore()
    first = open_(store, {"seed": 1})
    assert open_(store, {"seed": 1}) == first


def test_another_configuration_is_refused_with_the_difference_and_nothing_changes():
    store = MemoryStore()
    open_(store, {"seed": 1})
    before = {key: store.get(key) for key in store.list("")}
    with pytest.raises(ConflictingRecord, match="seed: 2 here, 1 there"):
        open_(store, {"seed": 2}, digest="other")
    assert {key: store.get(key) for key in store.list("")} == before


def test_another_model_is_refused_by_the_names_of_its_files():
    store = MemoryStore()
    open_(store, {"seed": 1}, model_files={"config.json": "aa", "tokenizer.json": "bb"})
    with pytest.raises(ConflictingRecord) as caught:
        open_(store, {"seed": 1}, model_files={"config.json": "aa", "tokenizer.json": "cc", "vocab.txt": "dd"})
    assert str(caught.value).splitlines()[1:] == [
        "  model/tokenizer.json: it differs, or only one of both has it",
        "  model/vocab.txt: it differs, or only one of both has it",
    ]


def test_every_command_begins_with_a_run_of_this_format(tmp_path):
    url = str(tmp_path / "run")
    with pytest.raises(LookupError, match=f"{url} holds no run$"):
        run.connect_to_run(url)
    assert not (tmp_path / "run").exists()
    store = connect(url)
    open_(store, {"seed": 1})
    assert run.connect_to_run(url).url == url
    store.put(layout.RUN, store.get(layout.RUN).replace(b'"format":1', b'"format":2'))
    with pytest.raises(CorruptObject, match="format 2; this version of Gleaner reads format 1"):
        run.connect_to_run(url)


@pytest.mark.parametrize("committed", [0, 1, 2, 3, 4, 7, 8, 33])
def test_the_next_iteration_is_the_number_of_reports(committed):
    store = MemoryStore()
    for iteration in range(committed):
        commit_report(store, iteration)
    assert run.next_iteration(store) == committed
    assert [report.iteration for report in run.reports(store)] == list(range(committed))


def test_the_lease_is_kept_by_its_holder_and_refused_to_others_while_it_lives():
    store, clock = MemoryStore(), ManualClock()
    run.acquire_lease(store, "a", 60, clock)
    run.acquire_lease(store, "a", 60, clock)

    class Beating(ManualClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            run.beat_lease(store, "a", self)

    with pytest.raises(run.RunBusy, match="execution 'a'"):
        run.acquire_lease(store, "b", 60, Beating())


def test_a_silent_holder_is_succeeded_after_the_ttl_and_not_before():
    store, clock = MemoryStore(), ManualClock()
    run.acquire_lease(store, "a", 60, clock)
    before = clock.monotonic()
    run.acquire_lease(store, "b", 60, clock)
    assert clock.monotonic() - before == pytest.approx(60)

    class Beats(ManualClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            run.beat_lease(store, "b", self)

    with pytest.raises(run.RunBusy):
        run.acquire_lease(store, "a", 60, Beats())


def test_a_waiting_execution_says_so_and_begins_when_the_lease_is_released(caplog):
    store, clock = MemoryStore("waits"), ManualClock(1_000_000_000)
    run.acquire_lease(store, "a", 3600, clock)

    class ReleasedLater(ManualClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            if self.wall() >= 1_000_000_100:
                run.release_lease(store, "a")

    later = ReleasedLater(1_000_000_000)
    run.acquire_lease(store, "b", 3600, later)
    assert run.lease_holder(store) == "b"
    assert later.wall() - 1_000_000_100 <= 2
    line = (
        "waiting for memory://waits, which is held by execution 'a', since 2001-09-09 01:46:40 UTC and until "
        "2001-09-09 02:46:40 UTC; this one begins when that releases it, or then if that gives no sign of life before "
        "(run.lease_ttl_s)"
    )
    # At once, and a minute later.
    assert [record.getMessage() for record in caplog.records] == [line, line]


@pytest.mark.parametrize("is_released", [False, True])
def test_of_two_that_wait_one_begins(is_released):
    store = MemoryStore()
    run.acquire_lease(store, "a", 60, ManualClock())

    class OtherIsFirst(ManualClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            if run.lease_holder(store) == "a":
                run.release_lease(store, "a")
                run.acquire_lease(store, "c", 60, ManualClock())
                if is_released:
                    run.release_lease(store, "c")

    if is_released:
        run.acquire_lease(store, "b", 60, OtherIsFirst())
        return
    with pytest.raises(run.RunBusy, match="was taken over by execution 'c'"):
        run.acquire_lease(store, "b", 60, OtherIsFirst())


def test_a_sign_of_life_is_seen_within_seconds_and_looked_for_ever_more_rarely():
    store, looks = MemoryStore(), []
    run.acquire_lease(store, "a", 3600, ManualClock())

    class Beats(ManualClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            run.beat_lease(store, "a", self)

    clock = Beats()
    with pytest.raises(run.RunBusy, match="'a'; try again"):
        run.acquire_lease(store, "b", 3600, clock)
    assert clock.monotonic() == 2

    class Counts(MemoryStore):
        def get(self, key, *bounds):
            looks.append(key == layout.LEASE_BEAT)
            return super().get(key, *bounds)

    silent = Counts()
    run.acquire_lease(silent, "a", 3600, ManualClock())
    looks.clear()
    run.acquire_lease(silent, "b", 3600, ManualClock())
    assert 100 < sum(looks) < 150


def test_heartbeats_of_the_crew_keep_the_lease_too():
    store = MemoryStore()
    run.acquire_lease(store, "a", 60, ManualClock())

    class CrewWorks(ManualClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            store.put(layout.alive(0, "00000-x"), str(self.wall()).encode())

    with pytest.raises(run.RunBusy):
        run.acquire_lease(store, "b", 60, CrewWorks())


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_crew_that_is_ahead_keeps_the_lease_too(ahead):
    """Rollout 0 has ended and its trainer has no machine yet; a later rollout is running."""
    store = MemoryStore()
    run.acquire_lease(store, "a", 60, ManualClock())
    for iteration in range(ahead + 1):
        write_plan(store, iteration)
    store.put(layout.alive(0, "00000-x"), b"gone")

    class NextCrewWorks(ManualClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            store.put(layout.alive(ahead, "00000-y"), str(self.wall()).encode())

    with pytest.raises(run.RunBusy):
        run.acquire_lease(store, "b", 60, NextCrewWorks())


@pytest.mark.parametrize("sign", [layout.alive(0, "00000-x"), layout.batch(0, 1)])
def test_an_evaluation_that_goes_on_keeps_the_lease_too(sign):
    """On one machine training waits for it: its crew beats, then its responses are graded."""
    store = MemoryStore()
    run.acquire_lease(store, "a", 60, ManualClock())
    prefix = f"{layout.EVALUATIONS}{layout.evaluation_name(0, 'ab')}/"
    store.put(f"{prefix}{layout.batch(0, 0)}", b"graded")

    class EvaluationGoesOn(ManualClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            store.put(f"{prefix}{sign}", str(self.wall()).encode())

    with pytest.raises(run.RunBusy):
        run.acquire_lease(store, "b", 60, EvaluationGoesOn())
    run.acquire_lease(store, "b", 60, ManualClock())  # an abandoned one does not


def write_plan(store, iteration, **changes):
    plan = a_plan(groups=3, generations=2, iteration=iteration, **changes)
    records.put(store, layout.plan(iteration), plan)
    return plan


def test_plans_in_flight_are_those_without_a_report():
    store = MemoryStore()
    assert run.plans_in_flight(store) == []
    plans = [write_plan(store, iteration) for iteration in range(3)]
    assert run.plans_in_flight(store) == plans
    commit_report(store, 0)
    assert run.plans_in_flight(store) == plans[1:]


def test_the_next_prompt_is_known_from_the_plan_before_it_is_known_from_the_report():
    store = MemoryStore()
    assert run.next_prompt(store, 0) == 0
    write_plan(store, 0, first_prompt=4)
    assert run.next_prompt(store, 1) == 7
    commit_report(store, 0)  # which says 0, and is the truth
    assert run.next_prompt(store, 1) == 0
    with pytest.raises(ObjectMissing):
        run.next_prompt(store, 3)


def test_the_newest_published_version_is_one_with_a_manifest():
    store = MemoryStore()
    assert run.published_version(store, 3, -2) is None
    for version in (0, 1):
        store.put(layout.manifest(layout.weights(version)), b"{}")
    store.put(layout.tensor_object(layout.weights(2), "half"), b"")
    assert run.published_version(store, 3, 0) == 1
    assert run.published_version(store, 1, 1) == 1
    assert run.published_version(store, 0, -1) == 0
    assert run.published_version(store, 3, 2) is None


def test_a_released_lease_and_a_holder_known_to_be_dead_need_no_wait():
    store, clock = MemoryStore(), ManualClock()
    run.acquire_lease(store, "a", 60, clock)
    run.release_lease(store, "a")
    run.acquire_lease(store, "b", 60, clock)
    run.acquire_lease(store, "c", 60, clock, known_dead=lambda holder: holder == "b")
    assert clock.monotonic() == 0
    run.release_lease(store, "b")  # not ours any more: no effect
    run.acquire_lease(store, "c", 60, clock)


def test_one_of_many_racing_successors_wins():
    store = MemoryStore()
    outcomes = []
    barrier = threading.Barrier(8)

    def race(name):
        barrier.wait()
        try:
            run.acquire_lease(store, name, 1, ManualClock())
            outcomes.append(name)
        except run.RunBusy:
            pass

    threads = [threading.Thread(target=race, args=(f"e{k}",)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A late reader may find a silent holder and succeed it in turn; but one epoch has one holder.
    assert len(store.list("lease/0")) == len(outcomes)
    assert outcomes


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_report_before_another_is_named(missing):
    store = MemoryStore("gap")
    for iteration in range(3):
        commit_report(store, iteration)
    assert run.count_committed(store) == len(run.reports(store)) == 3
    store.delete(layout.report(missing))
    with pytest.raises(CorruptObject, match=r"report\.json' is corrupt: it is missing, although .*/report"):
        run.reports(store)


def test_an_iteration_ahead_is_no_gap():
    store = MemoryStore("ahead")
    commit_report(store, 0)
    store.put(layout.plan(2), b"{}")
    assert run.count_committed(store) == 1
