"""The judge of width: it takes the property from ratios, and sees that a planner without machine starts is worse."""

import json
from dataclasses import asdict, replace

import pytest

from benchmarks.width_choice import ITERATIONS, WITHIN, Outcome, drawn, luck, merged, outcome, static_crews, targets
from tasks.planning import estimate, planned_crew

# Settings in which members would be worth their price, but not the half hour until a machine has started.
SLOW_STARTS = (0,)


def found(*ratios: float) -> list[Outcome]:
    return [Outcome(setting=k, ratio=ratio, best=(0, "auto"), widths=()) for k, ratio in enumerate(ratios)]


def test_the_property_is_about_nine_settings_in_ten():
    assert all(target.met for target in targets(found(*[1.0] * 90, *[1.04] * 10)))
    one_worse = {target.name: target.met for target in targets(found(*[1.0] * 89, *[1.04] * 11))}
    assert one_worse == {"ratio_median": True, "ratio_mean": True, "share_within_3_percent": False}


def test_parts_are_summed_up_as_if_they_had_run_together(tmp_path):
    whole = [replace(one, lucky=1.0 + one.setting / 100) for one in found(1.0, 1.05, 1.02)]
    for number, part in enumerate((whole[2:], whole[:2])):
        line = json.dumps({"outcomes": [asdict(one) for one in part]})
        (tmp_path / str(number)).write_text(f"a table\n{line}\n")
    files = [tmp_path / "0", tmp_path / "1"]
    assert merged(files) == whole
    with pytest.raises(ValueError, match="setting 2 in"):
        merged([files[0], files[0]])


def test_what_hindsight_owes_to_luck_is_what_a_crew_chosen_elsewhere_lacks():
    assert luck(found(1.0, 1.1)) == {}
    unlucky = [replace(one, lucky=lucky) for one, lucky in zip(found(1.1, 1.0), (1.1, 1.0), strict=True)]
    seen = luck(unlucky)
    assert seen["planner_over_best_elsewhere_mean"] == pytest.approx(1.0)
    assert seen["best_elsewhere_over_best_mean"] == pytest.approx(1.05)
    assert seen["best_elsewhere_within_3_percent"] == 0.5


def test_a_setting_is_its_number_and_its_static_crews_are_all_that_may_be_asked_for():
    assert drawn(3) == drawn(3) != drawn(4)
    crews = static_crews(drawn(3))
    count = drawn(3).pools[0].count
    assert set(crews) == {(0, "auto"), *((n, way) for n in range(1, count + 1) for way in ("auto", "off"))}
    assert {len(scenario.pools) for scenario in crews.values()} == {0, 1}
    # All may take their machines from the whole market, so that these come and go alike.
    assert {pool.places for scenario in crews.values() for pool in scenario.pools} == {count}


@pytest.mark.slow
def test_it_says_that_a_planner_without_machine_starts_is_worse(monkeypatch):
    """With the bug put in, every machine counts as if it were there."""
    right = [outcome(setting) for setting in SLOW_STARTS]
    assert all(len(one.widths) == ITERATIONS for one in right)
    for module in (planned_crew, estimate):
        monkeypatch.setattr(module, "ready", lambda pool, count: pool.expected(count))
    wrong = [outcome(setting) for setting in SLOW_STARTS]
    assert max(one.ratio for one in wrong) > max(one.ratio for one in right)
    assert max(one.ratio for one in wrong) > WITHIN
