import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resources.spot_trace import (
    AWS_P3,
    AWS_V100_WEST,
    PROCESSES,
    SpotEvent,
    SpotTrace,
    TraceError,
    draw_trace,
    lost_at_once,
    read_trace,
)
from tests.property_examples import part_of_examples

HOUR_S = 3600.0
BAMBOO = "0,add,a\n0,add,b\n60000,remove,a\n120000,add,c\n180000,remove,b\n180000,remove,c\n"


def up_at(trace: SpotTrace, time_s: float) -> set[str]:
    up = set()
    for event in trace.events:
        if event.time_s <= time_s:
            up ^= {event.node}
    return up


def test_bamboo_file_is_read(tmp_path: Path):
    (tmp_path / "t.csv").write_text(BAMBOO)
    trace = read_trace(tmp_path / "t.csv")
    assert trace.events[2] == SpotEvent(60.0, "a", up=False)
    assert (trace.losses, trace.span_s, trace.up_node_s) == (3, 180.0, 60.0 + 180.0 + 60.0)
    assert trace.losses_per_node_h == pytest.approx(3 / (300 / HOUR_S))
    assert lost_at_once(trace) == (1, 2)


def test_skypilot_file_is_read_as_machines_available(tmp_path: Path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300, "zone": "x"}, "data": [2, 2, 0, 1]}))
    trace = read_trace(path)
    assert [len(up_at(trace, tick * 300.0)) for tick in range(4)] == [2, 2, 0, 1]
    assert (trace.losses, trace.span_s) == (2, 1200.0)


def test_what_else_a_skypilot_file_holds_is_not_read(tmp_path: Path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [1, 0], "prices": [0.9, 0.9]}))
    assert read_trace(path).losses == 1


def test_of_interleaved_counts_the_later_line_holds(tmp_path: Path):
    # Each count stands for three minutes, although the next line has another after one; sorted, 4 machines were lost.
    rows = ("00:00:00, 8", "00:01:00, 8", "00:02:00, 8", "00:01:00, 6", "00:02:00, 6", "00:03:00, 7")
    (tmp_path / "t.txt").write_text("".join(f"2021-12-12, {row}\n" for row in rows))
    trace = read_trace(tmp_path / "t.txt")
    assert [(event.time_s, event.up) for event in trace.events[8:]] == [(60.0, False), (60.0, False), (180.0, True)]
    assert (trace.span_s, trace.losses) == (180.0, 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.dat", "", r"file type '\.dat'; allowed: \.csv, \.json, \.txt"),
        ("t.txt", "2021-12-11, 11:11:30, 5\n", "it has less than two lines"),
        ("t.txt", "2021-12-11, 11:11:30, 5\n2021-12-11, 11:12, -1\n", "line 2: value '2021-12-11, 11:12, -1'"),
        ("t.txt", "2021-12-11, 11:11:30\n", "line 1: value '2021-12-11, 11:11:30'; allowed: date, time, count"),
        ("t.csv", "", "it is empty"),
        ("t.csv", "0,add,a\n0,remove,a\n", "all its events are at second 0"),
        ("t.csv", "0,add,a\n5,stop,a\n", r"line 2: value '5,stop,a'; allowed: milliseconds,add\|remove,node"),
        ("t.csv", "0,add,a\n-5,remove,a\n", "line 2: value '-5,remove,a'"),
        ("t.csv", "0,add\n", "line 1: value '0,add'"),
        ("t.csv", "5,add,a\n1,add,b\n", r"event 1: time_s: value 0\.001; allowed: 0\.005 to"),
        ("t.csv", "0,add,a\n1,add,a\n", "event 1: node 'a' comes although it is up"),
        ("t.csv", "0,remove,a\n", "event 0: node 'a' is lost although it is not up"),
        ("t.json", "{", "Invalid JSON"),
        ("t.json", '{"data": [1]}', "metadata: "),
        ("t.json", '{"metadata": {"gap_seconds": 0}, "data": [1]}', r"metadata\.gap_seconds: value 0"),
        ("t.json", '{"metadata": {"gap_seconds": 1}, "data": [1, -1]}', r"data\.1: value -1"),
        ("t.json", '{"metadata": {"gap_seconds": 1}, "data": [1, 0.5]}', r"data\.1: value 0\.5"),
        ("t.json", '{"metadata": {"gap_seconds": 1}, "data": []}', r"data: value \[\]"),
    ],
)
def test_bad_file_is_named_with_the_line_and_value(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=message) as error:
        read_trace(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_missing_file(tmp_path: Path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "t.csv")


def test_scaling_moves_times_and_keeps_order():
    trace = draw_trace(AWS_P3, 8, 10 * HOUR_S, seed=1)
    half = trace.scaled(0.5)
    assert [e.time_s for e in half.events] == [0.5 * e.time_s for e in trace.events]
    assert half.losses_per_node_h == pytest.approx(2 * trace.losses_per_node_h)
    with pytest.raises(TraceError, match="factor: value 0"):
        trace.scaled(0)


def test_window_begins_with_what_is_up():
    trace = draw_trace(AWS_P3, 8, 20 * HOUR_S, seed=2)
    part = trace.window(4 * HOUR_S, 6 * HOUR_S)
    for hour in (0.0, 1.5, 6.0):
        assert up_at(part, hour * HOUR_S) == up_at(trace, (4 + hour) * HOUR_S)
    with pytest.raises(TraceError, match=r"window: .* allowed: within 0 to"):
        trace.window(15 * HOUR_S, 6 * HOUR_S)


@settings(max_examples=part_of_examples(0.5))
@given(places=st.integers(1, 12), seed=st.integers(0, 1000))
def test_a_part_of_a_trace_keeps_the_history_of_each_place(places: int, seed: int):
    trace = draw_trace(AWS_P3, 12, 30 * HOUR_S, seed=3)
    small = trace.part(places, seed)
    assert {event.node for event in small.events} == {f"place-{k}" for k in range(places)}
    times = Counter((event.time_s, event.up) for event in trace.events)
    assert all(times[event.time_s, event.up] for event in small.events)
    whole = trace.part(12, seed)
    assert [(e.time_s, e.up) for e in whole.events] == [(e.time_s, e.up) for e in trace.events]


def test_replacements_under_new_names_sit_on_freed_places(tmp_path: Path):
    (tmp_path / "t.csv").write_text(BAMBOO)
    trace = read_trace(tmp_path / "t.csv")
    assert len({event.node for event in trace.part(2, seed=0).events}) == 2
    with pytest.raises(TraceError, match="places: value 3; allowed: 1 to 2"):
        trace.part(3, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES.values(), ids=list(PROCESSES))
def test_drawn_trace_has_the_rate_of_its_process(process):
    trace = draw_trace(process, 16, 4000 * HOUR_S, seed=5)
    assert trace.losses_per_node_h == pytest.approx(process.losses_per_node_h, rel=0.15)
    assert trace == draw_trace(process, 16, 4000 * HOUR_S, seed=5)
    assert trace != draw_trace(process, 16, 4000 * HOUR_S, seed=6)


def test_mass_losses_take_everything():
    trace = draw_trace(AWS_V100_WEST, 16, 500 * HOUR_S, seed=0)
    left, everything = 0, 0
    times = sorted({event.time_s for event in trace.events if not event.up})
    for time_s in times:
        left = len(up_at(trace, time_s))
        everything += left == 0
    assert everything / len(times) > 0.6


def test_p3_process_loses_what_the_trace_lost_per_event():
    assert AWS_P3.lost_mean(24) == pytest.approx(167 / 79, rel=0.03)
    assert AWS_P3.down_time_s(0.0) == 0.0
    assert AWS_P3.down_time_s(0.5) == 540.0
    assert AWS_P3.down_time_s(0.3) == pytest.approx(300.0)
    assert AWS_P3.down_time_s(0.99) == 840.0


def test_bad_arguments():
    with pytest.raises(TraceError, match="nodes: value 0"):
        draw_trace(AWS_P3, 0, 10.0, seed=0)
