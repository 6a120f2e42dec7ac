import pytest

from tasks.crew_model.events import Events, Stalled


def test_actions_happen_in_order_of_time_and_then_of_asking():
    events, seen = Events(), []
    for at_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        events.at(at_s, lambda name=name: seen.append((events.now_s, name)))
    events.at(1.5, lambda: events.at(0.0, lambda: seen.append((events.now_s, "late"))))
    with pytest.raises(Stalled, match="after second 2"):
        events.run(lambda: False)
    assert seen == [(1.0, "a"), (1.0, "b"), (1.5, "late"), (2.0, "c")]


def test_time_stops_when_the_end_is_reached():
    events, seen = Events(), []
    for k in range(5):
        events.after(float(k), lambda k=k: seen.append(k))
    events.run(lambda: len(seen) == 2)
    assert (seen, events.now_s) == ([0, 1], 1.0)
