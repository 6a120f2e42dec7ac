"""A deleted field in a file is refused with what to do; a run that holds one goes on, and is the same run."""

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace

import pytest

from storage.records import layout, records
from storage.records.records import RunRecord, SettingsRecord
from storage.stores.memory import MemoryStore
from tasks.configuration.deleted_fields import CONSTANTS, DELETED, without_deleted
from tasks.configuration.evaluation import settings
from tasks.configuration.iteration_config import config_in_force, resolved_in_force, settings_of
from tasks.configuration.problems import names_at
from tasks.configuration.run_config import ConfigError, RunConfig, digest, dump, identity, parse, parse_held
from tasks.learning.recorded_advantages import recorded_advantages
from tests.forecast_documents import document
from tests.sessions import a_plan

URL = "memory://held"
FAR = {"more_rollout": {"far": {"machine": "p5.48xlarge", "gpus": 1, "count": 3}}}


def places(path: str) -> tuple[str | int, ...]:
    """The location in a document with the pool `far` and one reward."""
    names = path.split(".")
    item = 0 if "rewards" in names else "far"
    return tuple(item if name == "*" else name for name in names)


def with_all_sections(whole: dict) -> dict:
    """The document with the sections that may be left out."""
    evaluation = {"data": {"source": "arithmetic"}, "rewards": [{"function": "arithmetic"}]}
    return whole | {"turns": {"tools": ["tests.tool_functions:add"]}, "evaluation": evaluation}


def with_field(whole: dict, path: str, value: object = 1.0) -> dict:
    """A document that sets the field, with the pool `far`."""
    *parents, name = places(path)
    section = whole
    for each in parents:
        section = (
            section[each] if isinstance(section, list) else section.setdefault(each, [{}] if each == "rewards" else {})
        )
    section[name] = value
    return whole


def with_all(whole: dict, paths: Iterable[str] = DELETED) -> dict:
    for path in paths:
        with_field(whole, path, 4096 if path.endswith("data.size") else CONSTANTS.get(path, 1.0))
    return whole


def refused(path: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(with_field(document(pools=deepcopy(FAR)), path))
    return caught.value.problems


@pytest.mark.parametrize("path", DELETED)
def test_a_file_that_sets_a_deleted_field_gets_one_line_with_what_to_do(path):
    line = f"{'.'.join(map(str, places(path)))}: deleted field; {DELETED[path]}"
    assert [found for found in refused(path) if "missing; it has no default" not in found] == [line]


@pytest.mark.parametrize("path", DELETED)
def test_a_deleted_field_is_none_of_the_configuration(path):
    *section, name = places(path)
    assert names_at(RunConfig, tuple(section))
    assert name not in names_at(RunConfig, tuple(section))


@pytest.mark.parametrize("path", CONSTANTS)
def test_a_constant_that_decides_what_is_learned_is_in_the_digest_of_a_run(path):
    *section, name = places(path)
    found = identity(parse(with_all_sections(document())))
    for each in section:
        found = found[each]
    assert found[name] == CONSTANTS[path]
    assert path in DELETED


@pytest.mark.parametrize("path", CONSTANTS)
def test_a_run_that_holds_another_value_than_the_constant_is_refused(path):
    held, shown = with_field(with_all_sections(document()), path, 0.125), ".".join(map(str, places(path)))
    with pytest.raises(ConfigError, match=f"^the configuration .*\n  {shown}: value 0.125 held; allowed: ") as caught:
        parse_held(held)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("path", CONSTANTS)
def test_a_run_that_holds_another_value_than_the_constant_can_still_be_read(path):
    held = with_field(with_all_sections(document()), path, 0.125)
    assert parse_held(without_deleted(held, to_read=True)) == parse(with_all_sections(document()))
    store, plan = MemoryStore("read"), replace(a_plan(), config=held)
    records.put(store, layout.RUN, RunRecord(config=held, digest="0", vocab_size=9, model_files={}, created_at_s=0))
    assert "0.125" not in json.dumps(resolved_in_force(store, plan))
    assert recorded_advantages(plan, []) is None


def test_a_run_that_holds_deleted_fields_goes_on_as_the_same_run():
    config = parse(with_all_sections(document(URL, pools=deepcopy(FAR))))
    held, planned = with_all(dump(config)), with_all(dump(config))
    assert parse_held(held) == config
    store = MemoryStore("held")
    run = RunRecord(config=held, digest=digest(config), vocab_size=9, model_files={}, created_at_s=0)
    records.put(store, layout.RUN, run)
    plan = replace(a_plan(), config=planned)
    # Without settings of its own, as in a run from before these had a place, and with them.
    assert config_in_force(store, plan) == config
    others = ("evaluation.", "optimizer.", "critic.")
    paths = [path for path in DELETED if path not in CONSTANTS and not path.startswith(others)]
    records.put(store, layout.settings(plan.iteration), SettingsRecord(config=with_all(settings_of(config), paths)))
    found = config_in_force(store, plan)
    assert identity(found) == identity(config)
    assert digest(found) == run.digest


def test_nothing_else_is_left_out():
    whole = dump(parse(document(pools=deepcopy(FAR))))
    assert without_deleted(whole) == whole
    other = {"rewards": [{"arguments": {"forecast": {"mfu": 1}}}], "mfu": 1, "forecast": 3}
    assert without_deleted(other) == other


def test_rewards_in_the_form_of_an_older_run_are_read_and_make_the_same_run():
    penalty = {"function": "length", "arguments": {"free_tokens": 1, "scale_tokens": 4}, "on_failure": -1.0}
    shape = {"function": "format", "arguments": {"pattern": "a"}, "on_failure": "stop"}
    whole = with_all_sections(document()) | {"rewards": [penalty, shape]}
    whole["evaluation"]["rewards"] = [penalty]
    config = parse(whole)
    held = dump(config)
    none = {"arguments": None, "pattern": None, "free_tokens": None, "scale_tokens": None}
    lasting = {"on_failure": "use_failure_reward", "failure_reward": -1.0}
    older = [
        held["rewards"][0] | none | {"free_tokens": 1, "scale_tokens": 4} | lasting,
        held["rewards"][1] | none | {"pattern": "a", "failure_reward": 0.0},
    ]
    evaluation = held["evaluation"] | {"rewards": older[:1]}
    assert parse_held(held | {"rewards": older, "evaluation": evaluation}) == config
    deciding = [{name: reward[name] for name in (*none, *lasting)} for reward in older]
    assert [{name: reward[name] for name in (*none, *lasting)} for reward in identity(config)["rewards"]] == deciding
    named = settings(config.evaluation, config.rewards)["rewards"]
    assert [{name: reward[name] for name in (*none, *lasting)} for reward in named] == deciding[:1]


def test_a_number_of_generated_prompts_is_read_as_a_limit_and_makes_the_same_run():
    config = parse(document(data={"limit": 20}))
    held = dump(config)
    older = held["data"] | {"size": 20, "limit": None}
    assert parse_held(held | {"data": older}) == config
    assert parse_held(held | {"data": older | {"size": 90, "limit": 20}}) == config
    assert parse_held(held | {"data": older | {"size": 4096, "limit": 5000}}).data.limit == 4096
    found = identity(config)["data"]
    assert (found["size"], found["limit"]) == (20, None)
    found = identity(parse(document(data={"source": "a.csv", "limit": 20})))["data"]
    assert (found["size"], found["limit"]) == (4096, 20)


def test_two_fields_for_the_decays_of_an_optimizer_are_read_as_one_and_make_the_same_run():
    ppo = {"advantage_estimator": "gae"}
    config = parse(
        document(algorithm=ppo, optimizer={"betas": [0.8, 0.95]}, critic={"optimizer": {"betas": [0.9, 0.7]}})
    )
    held = dump(config)
    for section, betas in ((held, [0.8, 0.95]), (held["critic"], [0.9, 0.7])):
        assert section["optimizer"].pop("betas") == betas
        section["optimizer"] |= {"beta1": betas[0], "beta2": betas[1]}
    assert parse_held(held) == config
    assert identity(config)["optimizer"] == identity(parse_held(held))["optimizer"]
    assert identity(config)["critic"]["optimizer"].keys() >= {"beta1", "beta2"}
    assert "betas" not in identity(config)["optimizer"]
