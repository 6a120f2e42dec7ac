import os
import time
from pathlib import Path

import pytest

from benchmarks.baselines import SharedQueue, WholeBatch, release, results
from benchmarks.crew_processes import PREFILL, Decoded, StepLog
from benchmarks.resume import make_model
from benchmarks.squad import Blow, Squad, SquadRun, draw_blows, engine_time
from benchmarks.storm import ARMS, VLLM, Size, arm_rows, blows_for, plan_run
from resources.spot_trace import SpotEvent, SpotTrace
from storage.records.run import read_plan
from storage.stores.connect import connect
from tasks.configuration.iteration_config import config_in_force


def place_events(*times: tuple[float, bool], node: str = "place-0") -> list[SpotEvent]:
    return [SpotEvent(time_s, node, up) for time_s, up in times]


def blows(*times: tuple[float, bool], hang_share: float = 0.0) -> list[tuple[float, float]]:
    trace = SpotTrace(tuple(place_events((0.0, True), *times)), 100.0)
    drawn = draw_blows(trace, cold_start_s=2.0, hang_share=hang_share, seed=0)
    return [(blow.at_s, blow.ready_s) for blow in drawn]


def test_a_loss_is_a_blow_until_the_successor_has_started():
    assert blows((10.0, False), (15.0, True), (40.0, False), (50.0, True)) == [(10.0, 17.0), (40.0, 52.0)]


def test_a_place_lost_again_before_its_successor_started_stays_down():
    assert blows((10.0, False), (15.0, True), (16.0, False), (20.0, True)) == [(10.0, 22.0)]


def test_everybody_is_back_at_the_end_of_the_trace():
    assert blows((10.0, False)) == [(10.0, 100.0)]


def test_a_hang_ends_without_a_cold_start():
    assert blows((10.0, False), (15.0, True), hang_share=1.0) == [(10.0, 15.0)]


def test_blows_of_all_places_are_in_order_and_repeatable():
    size = Size()
    found = blows_for(3, size, None, "aws-p3")
    assert found == blows_for(3, size, None, "aws-p3") != blows_for(4, size, None, "aws-p3")
    assert [blow.at_s for blow in found] == sorted(blow.at_s for blow in found)
    assert {blow.place for blow in found} == set(range(size.places))
    hangs = sum(blow.hang for blow in found) / len(found)
    assert abs(hangs - size.hang_share) < 0.15


@pytest.mark.parametrize("size", [Size(), VLLM], ids=lambda size: size.engine)
def test_runs_differ_in_the_engine_alone(tmp_path: Path, size: Size):
    make_model(tmp_path / "model")
    store = connect(plan_run(tmp_path / "run", tmp_path / "model", size))
    plan = read_plan(store, 0)
    rollout = config_in_force(store, plan).rollout
    assert (rollout.engine, rollout.vllm.process) == (size.engine, "same")
    assert (plan.num_responses, len(plan.slots)) == (64, 8)
    assert (plan.run_seed, plan.sampling.max_completion_length) == (11, size.length)


def make_log(path: Path, *rows: Decoded) -> StepLog:
    log = StepLog(path, create=True)
    for row in rows:
        log.add(row)
    return log


def test_step_log_is_read_back(tmp_path: Path):
    rows = [Decoded(1.0, 0.5, PREFILL, 0), Decoded(2.0, 0.25, 7, 3), Decoded(2.0, 0.25, 8, 1)]
    make_log(tmp_path / "log", *rows)
    assert StepLog(tmp_path / "log").rows() == rows
    assert StepLog(tmp_path / "log").tokens() == 4


def test_engine_time_is_split_into_kept_wasted_and_idle(tmp_path: Path):
    # Place 0 decodes response 1 twice, two tokens each time, and is killed in between; place 1 hangs for 2 s of a step.
    lives = [
        (0, make_log(tmp_path / "a", Decoded(101.0, 1.0, PREFILL, 0), Decoded(103.0, 2.0, 1, 2))),
        (0, make_log(tmp_path / "b", Decoded(107.0, 2.0, 1, 2), Decoded(111.0, 1.0, 1, 1))),
        (1, make_log(tmp_path / "c", Decoded(106.0, 2.0, 2, 1), Decoded(106.0, 2.0, 3, 1))),
    ]
    struck = [Blow(at_s=3.0, place=0, hang=False, ready_s=5.0), Blow(at_s=3.5, place=1, hang=True, ready_s=5.5)]
    run = SquadRun(started_s=100.0, duration_s=10.0, lives=lives, blows=struck)
    found = engine_time(run, 2, {1: 2, 2: 1, 3: 1})
    assert found.up_s == 20.0 - 2.0 - 2.0
    assert found.busy_s == pytest.approx(1.0 + 2.0 + 2.0 + (4.0 - 2.0))
    assert found.idle_s == pytest.approx(9.0)
    assert (found.prefill_s, found.wasted_s) == (1.0, pytest.approx(2.0))
    assert (found.tokens, found.tokens_again, found.steps) == (6, 2, 3)
    assert found.step_s == pytest.approx((7.0 - 1.0) / 3)


def work_until(folder: str, log_path: str) -> None:
    """A worker that must live 1.5 s to leave its mark; it decodes a token of response 0 at its start."""
    now_s = time.monotonic()
    StepLog(Path(log_path)).add(Decoded(now_s, 0.0001, 0, 1))
    time.sleep(1.5)
    (Path(folder) / f"done-{os.getpid()}").write_text("")


def fail(log_path: str) -> None:
    raise SystemExit(3)


def leave(log_path: str) -> None:
    pass


@pytest.mark.slow
def test_squad_kills_stops_wakes_and_replaces(tmp_path: Path):
    noticed = []
    dealt = [Blow(at_s=0.15, place=0, hang=False, ready_s=0.5), Blow(at_s=0.15, place=1, hang=True, ready_s=0.9)]
    squad = Squad(
        tmp_path / "logs",
        work_until,
        [(str(tmp_path),)] * 3,
        detect_s=0.2,
        detected=lambda place, pid: noticed.append((place, pid)),
    )
    run = squad.run(dealt, lambda: len(list(tmp_path.glob("done-*"))) == 3)
    assert run.duration_s > 0.85
    assert [place for place, _ in run.lives] == [0, 1, 2, 0]
    assert list(run.blows) == dealt
    assert {place for place, _ in noticed} == {0, 1}


@pytest.mark.slow
def test_failing_and_idle_squads_are_errors(tmp_path: Path):
    with pytest.raises(RuntimeError, match="place 0 ended with exit code 3"):
        Squad(tmp_path / "a", fail, [()]).run([], lambda: False)
    with pytest.raises(RuntimeError, match="all workers have left"):
        Squad(tmp_path / "b", leave, [()]).run([], lambda: False)


def test_queue_gives_each_response_once_and_again_after_release(tmp_path: Path):
    one, other = (SharedQueue(tmp_path, range(4), name) for name in ("0-1", "1-2"))
    assert (one.take(3), other.take(3)) == ([0, 1, 2], [3])
    one.put(0, [5, 6])
    release(tmp_path, ["0-1"])
    assert sorted(one.lost([1, 2])) == [1, 2]
    assert other.take(3) == [1, 2]
    assert not other.complete()
    for response in (1, 2, 3):
        other.put(response, [response])
    assert other.complete()
    assert one.complete()
    assert results(tmp_path) == {0: [5, 6], 1: [1], 2: [2], 3: [3]}


def test_whole_batch_leaves_nothing_until_it_is_whole(tmp_path: Path):
    batch = WholeBatch(tmp_path / "batch-0", [4, 5])
    assert (batch.take(1), batch.take(3), batch.lost([4])) == ([4], [5], set())
    batch.put(5, [1])
    assert results(tmp_path) == {}
    assert not batch.complete()
    batch.put(4, [2, 3])
    assert batch.complete()
    assert results(tmp_path) == {5: [1], 4: [2, 3]}


def test_rows_are_ratios_to_the_undisturbed_arm():
    spent = {"busy_s": 10.0, "wasted_s": 0.0, "tokens_again": 0, "prefill_s": 1.0, "idle_s": 2.0, "step_s": 0.03}
    worse = {"busy_s": 25.0, "wasted_s": 5.0, "tokens_again": 30, "prefill_s": 2.0, "idle_s": 8.0, "step_s": 0.04}
    one = {
        "tokens": 100,
        "different": dict.fromkeys(ARMS, 0),
        "kills": dict.fromkeys(ARMS, 1),
        "hangs": dict.fromkeys(ARMS, 2),
        "duration_s": dict.fromkeys(ARMS, 6.0) | {"undisturbed": 3.0},
        "engine_time": dict.fromkeys(ARMS, worse) | {"undisturbed": spent},
    }
    row = next(row for row in arm_rows([one, one]) if row["arm"] == "Gleaner")
    assert (row["wall clock"], row["engine s"], row["engine s wasted"]) == (2.0, 2.5, 0.5)
    assert (row["tokens again"], row["idle s"], row["kills"], row["hangs"]) == (0.3, 4.0, 2, 4)
