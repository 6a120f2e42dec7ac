from dataclasses import replace

import pytest

from storage.records import layout, records
from storage.records.planning_records import PoolObservation
from storage.records.records import TRAIN_POOL, ReportRecord, SlotLife
from storage.stores.memory import MemoryStore
from tasks.forecasting.probe import REPORTS_READ, NoProbe, Probe, ToolProbe, probe, probe_run
from tests.committed_runs import begin


def report(iteration: int, *pools: PoolObservation, **metrics: float) -> ReportRecord:
    return ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=0,
        metrics={"num_tokens": 1000.0, "timing_s/iteration": 50.0, "cost/usd_iter": 2.0, **metrics},
        rewards=(0.0, 1.0),
        lengths=(100, 300),
        lives=(),
        train_started_at_s=0.0,
        train_ended_at_s=100.0,
        created_at_s=107.0,
        pools=pools,
    )


def life(pool: str = "rollout", *, started_at_s: float, ended_at_s: float) -> SlotLife:
    return SlotLife(
        slot=0,
        incarnation=f"{pool}-{started_at_s}",
        pool=pool,
        started_at_s=started_at_s,
        ended_at_s=ended_at_s,
        state="gone",
        tokens_kept=10,
        tokens_recovered=0,
        tokens_regenerated=0,
    )


def observation(step_s: tuple[tuple[int, float], ...] = ((1, 0.01), (8, 0.02)), **fields: object) -> PoolObservation:
    given = {"members": 2.0, "members_at_end": 2, "machine_s": 3600.0, "losses": 1, "start_s": 30.0, **fields}
    return PoolObservation(pool="rollout", step_s=step_s, **given)  # type: ignore[arg-type]


def stored(*reports: ReportRecord) -> MemoryStore:
    store = MemoryStore("probed")
    begin(store)
    for each in reports:
        records.commit(store, layout.report(each.iteration), each)
    return store


def probed(*reports: ReportRecord) -> Probe:
    found = probe(stored(*reports))
    assert isinstance(found, Probe)
    return found


def test_a_run_without_reports_gives_nothing_and_says_so():
    found = probe(MemoryStore("empty"))
    assert isinstance(found, NoProbe)
    assert found.reason.endswith("holds no committed iteration")


def test_a_store_that_does_not_let_us_in_is_no_error(monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    found = probe_run("s3://bucket/run")
    assert isinstance(found, NoProbe)
    assert found.reason.startswith("s3://bucket/run cannot be read: cannot get s3://bucket/run/run.json")
    assert len(found.reason.splitlines()) == 1


def test_what_one_report_says():
    timed = {"timing_s/compute": 5.0, "timing_s/publish": 3.0, "timing_s/restore": 9.0}
    found = probed(report(0, observation(), **timed))
    assert found.source.endswith(", iteration 0")
    pool = found.pools["rollout"]
    assert (pool.step_s, pool.start_s, pool.losses, pool.machine_h) == (((1, 0.01), (8, 0.02)), 30.0, 1, 1.0)
    assert (found.train_s_per_token, found.train_fixed_s, found.restore_s, found.control_s) == (0.005, 3.0, 9.0, 7.0)
    assert (found.lengths[0], found.lengths[20], found.lengths[-1]) == ((0.0, 100.0), (0.5, 200.0), (1.0, 300.0))


def test_several_reports_count_together():
    found = probed(
        report(0, observation(start_s=None, losses=0), **{"timing_s/compute": 5.0, "timing_s/publish": 2.0}),
        report(
            1,
            observation(((1, 0.03), (4, 0.05)), start_s=40.0),
            **{"timing_s/compute": 7.0, "timing_s/publish": 2.0},
        ),
        report(2, observation(((1, 0.02),), start_s=20.0), **{"timing_s/publish": 8.0}),
    )
    pool = found.pools["rollout"]
    assert pool.step_s == ((1, 0.02), (4, 0.05), (8, 0.02))
    assert (pool.start_s, pool.losses, pool.machine_h) == (30.0, 2, 3.0)
    assert found.train_s_per_token == pytest.approx(0.006)
    # Only some iterations may store a checkpoint.
    assert (found.train_fixed_s, found.restore_s) == (4.0, None)


def test_only_the_last_reports_count():
    found = probed(*(report(k, observation(((1, 1.0 + k),))) for k in range(REPORTS_READ + 3)))
    assert (found.first, found.last) == (3, REPORTS_READ + 2)
    assert found.pools["rollout"].step_s == ((1, 1.0 + 3 + (REPORTS_READ - 1) / 2),)


def test_without_observations_there_are_no_pools():
    found = probed(report(0))
    assert found.pools == {}
    assert found.train_s_per_token is None


def test_tools_are_averaged_over_all_responses_and_answers():
    told = [
        report(0, **{"turns/answers": 6.0, "turns/tool_seconds": 3.0}),
        report(1, **{"turns/answers": 2.0, "turns/tool_seconds": 9.0}),
    ]
    # Two responses in each report.
    assert probed(*told).tools == ToolProbe(answers=2.0, answer_s=1.5)
    assert probed(report(0), *(replace(each, iteration=each.iteration + 1) for each in told)).tools == ToolProbe(
        answers=2.0, answer_s=1.5
    )
    assert probed(report(0)).tools is None


def test_time_without_any_process_is_control():
    # Planned at 57, trained from 0 to 100, reported at 107.
    beside = replace(report(1), lives=(life(started_at_s=60.0, ended_at_s=90.0),), train_started_at_s=58.0)
    assert (probed(report(0), beside).in_turn, probed(report(0), beside).control_s) == (False, (7.0 + 10.0) / 2)
    # The run's first iteration waits for machines, which is no control.
    assert probed(replace(beside, iteration=0)).control_s == 7.0


def test_a_machine_that_runs_all_in_turn_is_recognised():
    lives = (life(started_at_s=60.0, ended_at_s=80.0), life(TRAIN_POOL, started_at_s=83.0, ended_at_s=90.0))
    after = replace(report(0), lives=lives, train_started_at_s=82.0)
    assert (probed(after).in_turn, probed(after).control_s) == (True, 7.0 + 2.0)
    beside = replace(after, iteration=1, train_started_at_s=79.0)
    assert probed(after, beside).in_turn is False
    # Without a crew nothing is known of turns.
    assert probed(report(0)).in_turn is False
