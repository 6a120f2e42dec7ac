import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from tasks.forecasting.scenario import AvailabilityScenario, Scenario, ScenarioError, load, parse
from tests.simulated_scenarios import a_pool, a_scenario


def dump(scenario: Scenario) -> dict:
    return json.loads(json.dumps(asdict(scenario)))


def a_document() -> dict:
    return dump(a_scenario(a_pool(2, availability=AvailabilityScenario(process="aws-p3"))))


def test_a_file_gives_the_same_scenario_back(tmp_path: Path):
    scenario = a_scenario(a_pool(2, availability=AvailabilityScenario(counts=((0.0, 2), (5.0, 1)))))
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(dump(scenario)))
    (tmp_path / "s.json").write_text(json.dumps(dump(scenario)))
    assert load(tmp_path / "s.yaml") == load(tmp_path / "s.json") == scenario


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path):
    text = yaml.safe_dump(a_document()).replace("train_s_per_token: 0.001", "train_s_per_token: 1e-3")
    (tmp_path / "s.yaml").write_text(text.replace("weights_bytes: 1000000000.0", "weights_bytes: 29.5e9"))
    read = load(tmp_path / "s.yaml")
    assert (read.trainer.train_s_per_token, read.policy.weights_bytes) == (0.001, 29.5e9)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("pools.0.count", -1, r"pools.0.count: value -1; allowed: greater than or equal to 0"),
        ("pools.0.count_min", 3, r"pools.0: count_min: value 3; allowed: 0 to count \(2\)"),
        ("pools.0.places", 1, r"pools.0: places: value 1; allowed: null, or at least count \(2\)"),
        ("pools.0.name", "train", r"pools.0: name: value 'train'"),
        ("pools.0.step_s", [[2, 0.1], [1, 0.1]], r"pools.0: points: batches"),
        ("pools.0.availability", {}, r"path, process, counts: value none given; allowed: exactly one"),
        ("pools.0.availability", {"process": "x"}, r"process: value 'x'; allowed: aws-p3"),
        ("pools.0.availability", {"counts": [[5, 1], [1, 2]]}, r"counts: seconds \[5.0, 1.0\]; allowed: ascending"),
        ("work.lengths.sigma", None, r"work.lengths: sigma, column: one is missing or too much"),
        ("work.lengths.quantiles", [[0, 1], [1, 2]], r"allowed: exactly one of them"),
        ("work.lengths.rho", 1.5, r"work.lengths.rho: value 1.5; allowed: less than or equal to 1"),
        ("work.prompts_in_dataset", 3, r"prompts_in_dataset: value 3; allowed: null, or at least"),
        ("policy.predictor", "magic", r"policy.predictor: value 'magic'; allowed: 'none'"),
        ("policy.flushing", 1, r"policy.flushing: unexpected keyword argument"),
        ("trainer.engines", None, r"trainer.engines: value None"),
        ("pools", [], r"pools: value no members, with trainer.engines 0"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(path, value, message):
    document = a_document()
    *parents, last = path.split(".")
    place = document
    for part in parents:
        place = place[int(part)] if part.isdecimal() else place[part]
    place[last] = value
    with pytest.raises(ScenarioError, match=message):
        parse(document)


def test_two_pools_of_one_name_are_refused():
    document = a_document()
    document["pools"].append(document["pools"][0])
    with pytest.raises(ScenarioError, match=r"pools: names \['rollout', 'rollout'\]; allowed: each once"):
        parse(document)


def test_what_is_no_scenario_is_refused(tmp_path: Path):
    with pytest.raises(ScenarioError, match="value of type list; allowed: a mapping"):
        parse([])
    with pytest.raises(ScenarioError, match=r"none\.yaml: cannot be read"):
        load(tmp_path / "none.yaml")
    (tmp_path / "s.yaml").write_text("a: [")
    with pytest.raises(ScenarioError, match=r"s\.yaml: not YAML or JSON: line 1"):
        load(tmp_path / "s.yaml")
