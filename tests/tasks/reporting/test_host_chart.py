import xml.etree.ElementTree as ET

import pytest

from storage.fleet.spent_records import SpentEntry
from tasks.concluding.host_tab import ENTRIES_MAX, host_chart

NAMES = {"own": "this run", "other": "another run <&>"}


def entries(*stretches, began_s=1000.0):
    """(kind, run, seconds) one after the other, each in iteration 7."""
    found, now_s = [], began_s
    for kind, run, seconds in stretches:
        ended_s = now_s + seconds
        iteration = None if run is None else 7
        found.append(SpentEntry(kind=kind, run=run, iteration=iteration, began_s=now_s, ended_s=ended_s))
        now_s = ended_s
    return found


def drawn(found, names=NAMES):
    return ET.fromstring(host_chart(found, names, "own", "The host <1>"))


def bars(drawing):
    """(hint, left, right, top) of each bar, from left to right."""
    rects = [(rect.findtext("{*}title"), rect.attrib) for rect in drawing.iter("{http://www.w3.org/2000/svg}rect")]
    found = [(hint, float(at["x"]), float(at["x"]) + float(at["width"]), float(at["y"])) for hint, at in rects if hint]
    return sorted(found, key=lambda bar: bar[1])


def words(drawing):
    return [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]


def test_each_run_has_a_row_with_its_stretches_where_they_were_and_idle_time_is_empty():
    found = entries(("switch", "other", 2.0), ("train", "other", 18.0), ("idle", None, 60.0), ("train", "own", 20.0))
    drawing = drawn(found)
    switch, train, own = bars(drawing)
    assert own[3] < switch[3] == train[3]
    assert switch[2] == pytest.approx(train[1], abs=0.1)
    width = own[2] - switch[1]
    assert abs((own[1] - train[2]) / width - 0.6) < 0.01
    assert abs((train[2] - train[1]) / width - 0.18) < 0.01
    assert words(drawing).count("this run") == 1


def test_only_the_iterations_of_the_own_run_are_told():
    hints = [bar[0] for bar in bars(drawn(entries(("train", "other", 18.0), ("park", "own", 1.5))))]
    assert hints == ["another run <&>: trains, 18.0 s", "this run, iteration 7: its state leaves the device, 1.5 s"]


def test_without_entries_there_is_a_card_that_says_so_and_of_many_the_last_are_drawn():
    assert "no data" in words(drawn([]))
    found = entries(*[("train", "own", 1.0)] * (ENTRIES_MAX + 50))
    assert len(bars(drawn(found))) == ENTRIES_MAX
    assert len(host_chart(found, NAMES, "own", "x")) < 100_000


def test_a_long_name_is_cut():
    name = "a-run-with-a-very-long-name"
    assert name[:17] + "…" in words(drawn(entries(("train", "other", 1.0)), NAMES | {"other": name}))
