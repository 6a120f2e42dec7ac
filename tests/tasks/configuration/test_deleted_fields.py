"""A deleted field in a file is refused with what to do; a run that holds one goes on, and is the same run."""

from dataclasses import replace

import pytest

from storage.records import layout, records
from storage.records.records import RunRecord, SettingsRecord
from storage.stores.memory import MemoryStore
from tasks.configuration.deleted_fields import DELETED, without_deleted
from tasks.configuration.iteration_config import config_in_force, settings_of
from tasks.configuration.operational import OPERATIONAL
from tasks.configuration.problems import names_at
from tasks.configuration.run_config import ConfigError, RunConfig, digest, dump, identity, parse
from tests.forecast_documents import document
from tests.sessions import a_plan

URL = "memory://held"
FAR = {"more_rollout": {"far": {"machine": "p5.48xlarge", "gpus": 1, "count": 3}}}


def places(path: str) -> tuple[str, ...]:
    return tuple("far" if name == "*" else name for name in path.split("."))


def with_field(whole: dict, path: str, value: object = 1.0) -> dict:
    """A document that sets the field, with the pool `far`."""
    *parents, name = places(path)
    section = whole
    for each in parents:
        section = section.setdefault(each, {})
    section[name] = value
    return whole


def with_all(whole: dict) -> dict:
    for path in DELETED:
        with_field(whole, path)
    return whole


@pytest.mark.parametrize("path", DELETED)
def test_a_file_that_sets_a_deleted_field_gets_one_line_with_what_to_do(path):
    with pytest.raises(ConfigError) as caught:
        parse(with_field(document(pools=FAR), path))
    assert caught.value.problems == [f"{'.'.join(places(path))}: deleted field; {DELETED[path]}"]


@pytest.mark.parametrize("path", DELETED)
def test_a_deleted_field_is_none_of_the_configuration_and_decided_nothing_that_is_learned(path):
    *section, name = places(path)
    assert names_at(RunConfig, tuple(section))
    assert name not in names_at(RunConfig, tuple(section))
    assert OPERATIONAL[section[0]] is None


def test_a_run_that_holds_deleted_fields_goes_on_as_the_same_run():
    config = parse(document(URL, pools=FAR, forecast={"more_rollout": {"far": {"link_gbps": 2.0}}}))
    held, planned = with_all(dump(config)), with_all(dump(config))
    assert parse(held, held=True) == config
    store = MemoryStore("held")
    run = RunRecord(config=held, digest=digest(config), vocab_size=9, model_files={}, created_at_s=0)
    records.put(store, layout.RUN, run)
    plan = replace(a_plan(), config=planned)
    # Without settings of its own, as in a run from before these had a place, and with them.
    assert config_in_force(store, plan) == config
    records.put(store, layout.settings(plan.iteration), SettingsRecord(config=with_all(settings_of(config))))
    found = config_in_force(store, plan)
    assert identity(found) == identity(config)
    assert digest(found) == run.digest


def test_nothing_else_is_left_out():
    whole = dump(parse(document(pools=FAR)))
    assert without_deleted(whole) == whole
    other = {"rewards": [{"arguments": {"forecast": {"mfu": 1}}}], "mfu": 1, "forecast": 3}
    assert without_deleted(other) == other
