import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Literal

from storage.records.records import SlotLife
from tasks.reporting.timeline import STARTING, timeline

EPOCH_S = 1.79e9


def life(
    slot: int, name: str, start_s: float, end_s: float, state: Literal["gone", "lost"] = "gone", *, recovered: int = 0
) -> SlotLife:
    return SlotLife(
        slot=slot,
        incarnation=name,
        pool="spot",
        started_at_s=EPOCH_S + start_s,
        ended_at_s=EPOCH_S + end_s,
        state=state,
        tokens_kept=1000,
        tokens_recovered=recovered,
        tokens_regenerated=7,
    )


def draw(*lives: SlotLife, trained_s: tuple[float, float] = (10.0, 20.0)) -> ET.Element:
    return ET.fromstring(timeline(lives, EPOCH_S + trained_s[0], EPOCH_S + trained_s[1], "Slots <0>"))


def found(drawing: ET.Element, tag: str) -> list[ET.Element]:
    return list(drawing.iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def bars(drawing: ET.Element) -> dict[str, ET.Element]:
    """The bars by the first word of their hints: an incarnation or the trainer."""
    with_hint = [(node.findtext("{*}title"), node) for node in found(drawing, "rect")]
    return {hint.split()[0].rstrip(","): node for hint, node in with_hint if hint}


def x_span(node: ET.Element) -> tuple[float, float]:
    return float(node.attrib["x"]), float(node.attrib["x"]) + float(node.attrib["width"])


def words(drawing: ET.Element) -> list[str]:
    return [node.text or "" for node in found(drawing, "text")]


def test_a_kill_and_its_resume_are_marked_where_they_happened():
    drawing = draw(life(0, "a", 0, 20), life(1, "b", 0, 8, "lost"), life(1, "c", 10, 20, recovered=1234))
    spans = {name: x_span(node) for name, node in bars(drawing).items()}
    assert spans["trainer"][1] == spans["a"][1]
    assert spans["b"][1] < spans["c"][0] == spans["trainer"][0]
    _, cross = found(drawing, "path")  # the first is in the key
    assert abs(float(cross.attrib["d"][1:].split()[0]) + 6 - spans["b"][1]) < 0.1
    _, triangle = found(drawing, "polygon")
    corners = [tuple(map(float, corner.split(","))) for corner in triangle.attrib["points"].split()]
    assert abs(corners[0][0] - spans["c"][0]) < 0.1
    top, height = (float(bars(drawing)["c"].attrib[name]) for name in ("y", "height"))
    assert [y for _, y in corners] == [top, top + height / 2, top + height]
    assert "+1,234 recovered, 1,000 tokens" in words(drawing)
    hint = bars(drawing)["c"].findtext("{*}title")
    assert hint is not None
    assert "1,234 recovered from its predecessor, 7 regenerated" in hint


def test_slots_have_a_row_each_in_order_and_the_trainer_is_last():
    drawing = draw(life(2, "c", 0, 9), life(0, "a", 1, 9), life(10, "k", 2, 9))
    labels = [word for word in words(drawing) if word.startswith("slot ") or word == "trainer"]
    assert labels == ["slot 0", "slot 2", "slot 10", "trainer"]


def test_overlapping_lives_of_a_slot_do_not_cover_each_other():
    drawing = draw(life(0, "zombie", 0, 9, "lost"), life(0, "successor", 5, 12), life(0, "third", 12, 15))
    tops = {name: float(node.attrib["y"]) for name, node in bars(drawing).items()}
    assert tops["zombie"] < tops["successor"]
    assert tops["third"] == tops["zombie"]
    assert tops["trainer"] > tops["successor"]


def test_nothing_hides_outside_the_drawing():
    drawing = draw(life(0, "a", 0, 20, "lost"), life(1, "b", 19.99, 20, "lost"), trained_s=(3.0, 90.0))
    assert all(0 <= edge <= 900 for bar in bars(drawing).values() for edge in x_span(bar))


def test_many_lives_are_cut_to_the_busiest_slots():
    lives = [life(slot, f"{slot}-0", 0, 9) for slot in range(300)]
    lives += [life(299, f"299-{k}", 10 * k, 10 * k + 9, "lost") for k in range(1, 20)]
    drawing = draw(*lives)
    assert len(bars(drawing)) == 151
    assert "169 more slots with fewer lives are not drawn" in words(drawing)
    assert "slot 299" in words(drawing)


def test_no_events_and_no_trainer():
    assert "no data" in words(draw(trained_s=(0.0, 0.0)))
    drawing = draw(life(0, "a", 0, 0), trained_s=(5.0, 0.0))
    assert set(bars(drawing)) == {"a"}
    assert set(bars(draw())) == {"trainer"}


def test_the_part_before_the_weights_is_drawn_apart():
    one = replace(life(0, "a", 0, 20), working_at_s=EPOCH_S + 5, decode_s=12.0)
    drawing = draw(one, replace(life(1, "b", 0, 8, "lost"), tokens_kept=0, tokens_regenerated=0))
    starting = [x_span(node) for node in found(drawing, "rect") if node.attrib["fill"] == STARTING][1:]
    whole = bars(drawing)
    assert [span[0] for span in starting] == [x_span(whole["a"])[0], x_span(whole["b"])[0]]
    assert abs((starting[0][1] - starting[0][0]) * 4 - (x_span(whole["a"])[1] - x_span(whole["a"])[0])) < 0.1
    # It never had the weights.
    assert starting[1] == x_span(whole["b"])
    hint = whole["a"].findtext("{*}title") or ""
    assert "20.0 s (5.0 s until it had the weights, 12.0 s of decoding, 3.0 s standing by)" in hint


def test_words_do_not_cross_the_edge_between_starting_and_generating():
    """Of three lives, the words are in the part that generates, in the part before it, or fewer; never across."""
    wide = replace(life(0, "a", 0, 20), working_at_s=EPOCH_S + 1)
    narrow = replace(life(1, "b", 0, 20), working_at_s=EPOCH_S + 19)
    halves = replace(life(2, "c", 0, 5, recovered=1234), working_at_s=EPOCH_S + 2)
    drawing = draw(wide, narrow, halves)
    edges = [x_span(node)[1] for node in found(drawing, "rect") if node.attrib["fill"] == STARTING][1:]
    shown = [
        node for node in found(drawing, "text") if "tokens" in (node.text or "") or "recovered" in (node.text or "")
    ]
    spans = [(float(node.attrib["x"]), float(node.attrib["x"]) + 6.3 * len(node.text or "")) for node in shown[1:]]
    assert [node.text for node in shown[1:]] == ["1,000 tokens", "1,000 tokens", "+1,234 recovered"]
    assert spans[0][0] > edges[0]
    assert spans[1][1] < edges[1]
    assert spans[2][0] > edges[2]
