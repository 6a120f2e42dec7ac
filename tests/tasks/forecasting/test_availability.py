from itertools import takewhile

import pytest

from resources.spot_trace import TraceError
from tasks.forecasting.availability import changes
from tasks.forecasting.scenario import AvailabilityScenario

BAMBOO = "0,add,a\n10000,add,b\n20000,remove,a\n30000,add,c\n40000,remove,b\n"


def until(scenario: AvailabilityScenario | None, places: int, end_s: float, seed: int = 0) -> list:
    return list(takewhile(lambda change: change[0] <= end_s, changes(scenario, places, seed)))


def test_without_a_trace_all_are_there():
    assert until(None, 3, 1e9) == [(0.0, 0, True), (0.0, 1, True), (0.0, 2, True)]
    assert until(AvailabilityScenario(process="aws-p3"), 0, 1e9) == []


def test_counts_come_and_go_last_come_first_gone():
    scenario = AvailabilityScenario(counts=((0.0, 3), (5.0, 1), (9.0, 9)))
    first, shrunk, grown = (0.0, 0, True), [(5.0, 2, False), (5.0, 1, False)], [(9.0, 1, True), (9.0, 2, True)]
    assert until(scenario, 3, 1e9) == [first, (0.0, 1, True), (0.0, 2, True), *shrunk, *grown]


def test_a_trace_begins_where_it_is_told_and_begins_again_behind_its_end(tmp_path):
    (tmp_path / "t.csv").write_text(BAMBOO)
    scenario = AvailabilityScenario(path=str(tmp_path / "t.csv"), start_s=15.0)
    # At 25 s the trace is over: who is up then stays, and comes to no harm when the trace lets it come again.
    ups = [(at_s, up) for at_s, _, up in until(scenario, 2, 60.0)]
    downs = [(5.0, False), (15.0, True), (25.0, False), (35.0, True), (45.0, False), (55.0, True)]
    assert ups == [(0.0, True), (0.0, True), *downs]


def test_every_place_comes_and_goes_in_turn():
    there: dict[int, bool] = {}
    for _, place, up in until(AvailabilityScenario(process="aws-v100-us-west-2a", rate_factor=5.0), 8, 100 * 3600.0):
        assert there.get(place, False) != up
        there[place] = up
    assert len(there) == 8


def test_a_factor_makes_losses_more_frequent(tmp_path):
    def losses(**given) -> int:
        return sum(not up for _, _, up in until(AvailabilityScenario(**given), 16, 24 * 3600.0, seed=3))

    assert losses(process="aws-p3", rate_factor=3.0) > 2 * losses(process="aws-p3")
    (tmp_path / "t.csv").write_text(BAMBOO)
    slow, quick = (
        until(AvailabilityScenario(path=str(tmp_path / "t.csv"), start_s=0.0, rate_factor=factor), 1, 3600.0)
        for factor in (1.0, 2.0)
    )
    assert quick[1][0] == slow[1][0] / 2


@pytest.mark.parametrize("start_s", [0.0, 5.0, None])
def test_a_trace_without_a_loss_ends_when_every_place_has_its_machine(tmp_path, start_s):
    """Drawn with few losses, a day may have none; a search for the next one would not end."""
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n10,add,b\n20,remove,b\n")
    kept = AvailabilityScenario(path=str(trace), start_s=start_s)
    assert len(list(zip(range(9), changes(kept, 2, seed=1), strict=False))) == 9
    rare = AvailabilityScenario(process="aws-p3", rate_factor=1e-6, start_s=start_s)
    assert sorted((place, up) for _, place, up in changes(rare, 2, seed=1)) == [(0, True), (1, True)]


def test_more_places_than_the_trace_has_are_refused(tmp_path):
    (tmp_path / "t.csv").write_text(BAMBOO)
    with pytest.raises(TraceError, match="places: value 3; allowed: 1 to 2"):
        until(AvailabilityScenario(path=str(tmp_path / "t.csv")), 3, 1.0)
