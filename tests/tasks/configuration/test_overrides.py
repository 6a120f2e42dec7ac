"""Fields given beside a configuration's file: what they change, and what is said of a wrong one."""

import json

import pytest

from tasks.configuration.overrides import load_with, overridden
from tasks.configuration.run_config import ConfigError, dump, load, settings_digest
from tests.small_run import document

DOCUMENT = {"a": {"b": 1, "c": [{"d": 2}, {"d": 3}]}, "lora": None}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a.b=1e-6", DOCUMENT | {"a": DOCUMENT["a"] | {"b": 1e-6}}),
        ("a.c.1.d=x", DOCUMENT | {"a": {"b": 1, "c": [{"d": 2}, {"d": "x"}]}}),
        ("a.c=[]", DOCUMENT | {"a": {"b": 1, "c": []}}),
        ("a.b=", DOCUMENT | {"a": DOCUMENT["a"] | {"b": None}}),
        ("a.b=a=b", DOCUMENT | {"a": DOCUMENT["a"] | {"b": "a=b"}}),
        ("a.b={e: true}", DOCUMENT | {"a": DOCUMENT["a"] | {"b": {"e": True}}}),
        ("lora.rank=8", DOCUMENT | {"lora": {"rank": 8}}),
        ("new.deep.field='7'", DOCUMENT | {"new": {"deep": {"field": "7"}}}),
    ],
)
def test_it_changes_one_place_and_makes_missing_sections(override, expected):
    before = json.dumps(DOCUMENT)
    assert overridden(DOCUMENT, [override]) == expected
    assert json.dumps(DOCUMENT) == before


def test_the_last_one_wins_and_an_empty_file_can_be_filled():
    assert overridden(None, ["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("a.b", "override: value 'a.b'; allowed: FIELD=VALUE, such as optimizer.learning_rate=1e-6"),
        ("=1", "override: value '=1'; allowed: FIELD=VALUE"),
        ("a..b=1", "override: value 'a..b=1'; allowed: FIELD=VALUE"),
        ("a.b.c=1", "a.b.c=1: a.b is 1; allowed: a section, or a list"),
        ("a.c.2.d=1", "a.c.2.d=1: a.c.2 given; allowed: an index from 0 to 1"),
        ("a.c.d=1", "a.c.d=1: a.c.d given; allowed: an index from 0 to 1"),
        ("a.b=[1", "a.b: value '[1' is not YAML or JSON: line 1: "),
        ("a.b=1:30", "a.b: value '1:30' is "),
    ],
)
def test_a_wrong_one_is_refused_in_a_line(override, said):
    with pytest.raises(ValueError, match=r"^(override|a)") as caught:
        overridden(DOCUMENT, [override])
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_an_index_of_an_empty_list_is_refused():
    with pytest.raises(ValueError, match=r"^rewards.0.weight=2: rewards.0 given; allowed: rewards=\[...\], because"):
        overridden({"rewards": []}, ["rewards.0.weight=2"])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(json.dumps(document(str(tmp_path / "run"), tmp_path)))
    return path


def test_it_is_part_of_the_configuration_and_of_its_digest(file):
    changed = load_with(file, ["optimizer.learning_rate=1e-6", "rewards.0.weight=2"])
    assert (changed.optimizer.learning_rate, changed.rewards[0].weight) == (1e-6, 2.0)
    assert settings_digest(changed) != settings_digest(load(file))
    assert dump(changed)["optimizer"]["learning_rate"] == 1e-6
    assert load_with(file, []) == load(file)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.learning_rat=1e-6", "optimizer.learning_rat: unknown field; did you mean 'learning_rate'"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate: "),
        (
            "algorithm.num_mini_batches=99",
            "algorithm.num_mini_batches: value 99; allowed: 1 to run.num_prompts_per_step",
        ),
        ("run.url.x=1", "run.url.x=1: run.url is "),
    ],
)
def test_misspelt_names_wrong_values_and_clashes_have_the_hints_of_a_file(file, override, said):
    with pytest.raises(ConfigError) as caught:
        load_with(file, [override])
    first, line = str(caught.value).splitlines()
    assert first == f"{file} is not a valid run configuration:"
    assert line.startswith(f"  {said}")
