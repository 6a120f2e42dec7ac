"""What runs is run.json's, whatever settings and plans say; intervals, limits and devices are the execution's."""

import json
from dataclasses import replace

import pytest

from storage.records import layout, records
from storage.records.records import RunRecord, SettingsRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing
from tasks.configuration.iteration_config import SETTINGS, config_in_force, resolved_in_force, settings_of
from tasks.configuration.operational import OPERATIONAL
from tasks.configuration.run_config import ConfigError, digest, dump, identity, parse, parse_held
from tests.sessions import a_plan

DOCUMENT = {
    "run": {"url": "memory://held"},
    "policy": {"path": "m"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "mine:reward"}, {"function": "reward_model", "model": "judge"}],
    "turns": {"tools": ["mine:search"]},
    "evaluation": {"data": {"source": "arithmetic"}, "rewards": [{"function": "mine:score"}]},
}
EVIL = "evil:function"


def changed(document, **sections):
    """The document with these fields by path, with "__" for a dot; numbers are indices."""
    copy = json.loads(json.dumps(document))
    for path, value in sections.items():
        *parents, last = path.split("__")
        node = copy
        for name in parents:
            node = node[int(name)] if name.isdigit() else node.setdefault(name, {})
        node[last] = value
    return copy


def held(settings=None, planned=DOCUMENT, *, of_evaluation=False):
    """(store, plan) of a run that began with DOCUMENT; settings, planned: what the settings' and the plan's say."""
    store = MemoryStore("held")
    config = parse(DOCUMENT)
    run = RunRecord(config=dump(config), digest=digest(config), vocab_size=9, model_files={}, created_at_s=0)
    records.put(store, layout.RUN, run)
    plan = replace(a_plan(), config=dump(parse(planned)), weights_url="../.." if of_evaluation else None)
    if settings is not None:
        records.put(store, layout.settings(plan.iteration), SettingsRecord(config=settings))
    return store, plan


OPERATED = {
    "run__lease_ttl_s": 60.0,
    "rewards__0__time_limit_s": 3.0,
    "rewards__1__time_limit_s": 4.0,
    "turns__processes": 7,
    "rollout__claim_ttl_s": 99.0,
    "rollout__vllm__tensor_parallel_size": 1,
    "trainer__group_timeout_s": 5.0,
    "pools__rollout__count": 11,
    "retention__compact": False,
}


def test_intervals_limits_and_devices_are_those_of_the_execution():
    told = parse(changed(DOCUMENT, **OPERATED))
    assert config_in_force(*held(settings_of(told))) == told


@pytest.mark.parametrize("where", ["settings", "plan"])
def test_what_an_evaluation_runs_and_measures_is_no_setting_but_its_limits_are(where):
    told = changed(DOCUMENT, evaluation__rewards__0__time_limit_s=4.0, evaluation__num_generations=2)
    asked = parse(changed(DOCUMENT, evaluation__rewards__0__time_limit_s=4.0))
    given = settings_of(parse(told), of_evaluation=True) if where == "settings" else None
    assert config_in_force(*held(given, told, of_evaluation=True)) == asked
    given = settings_of(parse(told)) if where == "settings" else None
    assert config_in_force(*held(given, told)) == parse(DOCUMENT)


def test_a_run_may_be_evaluated_by_other_rewards_later():
    told = changed(DOCUMENT, evaluation__rewards=[{"function": "mine:score"}, {"function": "mine:second"}])
    for given in (settings_of(parse(told)), None):
        assert config_in_force(*held(given, told)) == parse(DOCUMENT)


def test_where_a_reward_model_lies_is_what_the_run_began_with():
    told = parse(changed(DOCUMENT, rewards__1__model="another"))
    assert config_in_force(*held(settings_of(told))) == parse(DOCUMENT)


def test_without_settings_those_of_the_plan_are_in_force():
    told = changed(DOCUMENT, **OPERATED)
    assert config_in_force(*held(None, told)) == parse(told)


def test_a_run_from_before_a_section_existed_is_read():
    store, plan = held(settings_of(parse(DOCUMENT)))
    run = records.read(store, RunRecord, layout.RUN)
    for section in ("forecast", "tracking", "planning"):
        del run.config[section]
    records.put(store, layout.RUN, run)
    assert config_in_force(store, plan) == parse(DOCUMENT)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rewards__0__function": EVIL}, "rewards.0.function"),
        ({"rewards__1__model": "evil"}, "rewards.1.model"),
        ({"turns__tools": [EVIL]}, "turns.tools"),
        ({"turns__environment": EVIL}, "turns.environment"),
        ({"algorithm__advantage_estimator": EVIL}, "algorithm"),
        ({"evaluation__rewards__0__function": EVIL}, "evaluation.rewards.0.function"),
        ({"evaluation__data__source": "evil"}, "evaluation.data"),
        ({"policy__path": "evil"}, "policy"),
        ({"data__source": "evil"}, "data.source"),
        ({"sampling__temperature": 0.5}, "sampling"),
        ({"unheard_of": EVIL}, "unheard_of"),
    ],
)
def test_settings_that_name_what_runs_or_what_is_learned_are_refused_by_name(fields, named):
    settings = changed(settings_of(parse(DOCUMENT), of_evaluation=True), **fields)
    store, plan = held(settings)
    with pytest.raises(
        CorruptObject, match=rf"settings/000000\.json.*config: {named} given; allowed: intervals, limits"
    ):
        config_in_force(store, plan)


def test_settings_of_another_number_of_rewards_are_refused():
    settings = settings_of(parse(DOCUMENT))
    settings["rewards"].pop()
    with pytest.raises(CorruptObject, match=r"config: rewards: 1 items; allowed: 2, as in run\.json"):
        config_in_force(*held(settings))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rewards__0__function": EVIL}, "rewards.0.function"),
        ({"turns__tools": [EVIL]}, "turns.tools.0"),
        ({"algorithm__advantage_estimator": EVIL}, "algorithm.advantage_estimator"),
        ({"run__seed": 99}, "run.seed"),
    ],
)
@pytest.mark.parametrize("with_settings", [True, False])
def test_a_plan_of_another_configuration_is_refused(fields, named, with_settings):
    settings = settings_of(parse(DOCUMENT)) if with_settings else None
    store, plan = held(settings, changed(DOCUMENT, **fields))
    line = rf"^iterations/000000/plan\.json has another configuration \(here\) than run\.json \(there\):\n  {named}: "
    with pytest.raises(ConflictingRecord, match=line):
        config_in_force(store, plan)


def test_without_the_run_nothing_is_in_force():
    store, plan = held(settings_of(parse(DOCUMENT)))
    store.delete(layout.RUN)
    with pytest.raises(ObjectMissing):
        resolved_in_force(store, plan)


def test_each_field_either_decides_what_is_learned_or_may_be_set_but_how_one_evaluates_and_where_a_model_lies():
    assert {path for path, names in SETTINGS.items() if names is None} == {
        path for path, names in OPERATIONAL.items() if names is None and path != "evaluation"
    }
    config = parse(changed(DOCUMENT, **OPERATED))
    learned, settings = identity(config), settings_of(config)
    neither = {
        name for name in dump(config)["rewards"][0] if name not in {*learned["rewards"][0], *settings["rewards"][0]}
    }
    assert neither == {"model", "revision"}
    assert all(not {*learned["rewards"][0]} & {*given} for given in settings["rewards"])


def test_a_run_that_holds_a_secret_already_goes_on():
    """It was begun before secrets were refused, and what it holds is neither lost nor kept out by a refusal."""
    secret = changed(DOCUMENT, pools={"rollout": {"env": [{"name": "DB_PASS", "value": "hunter2"}]}})
    with pytest.raises(ConfigError, match=r"pools\.rollout\.env\.0\.value"):
        parse(secret)
    store = MemoryStore("held")
    config = parse_held(secret)
    run = RunRecord(config=dump(config), digest=digest(config), vocab_size=9, model_files={}, created_at_s=0)
    records.put(store, layout.RUN, run)
    assert config_in_force(store, replace(a_plan(), config=dump(config))) == config


def test_a_deleted_length_predictor_is_refused_with_its_cure_and_a_run_that_holds_it_goes_on():
    old = changed(DOCUMENT, planning__length_predictor="features")
    with pytest.raises(ConfigError) as refused:
        parse(old)
    assert refused.value.args[0].splitlines()[-1].strip() == (
        "planning.length_predictor: \"features\" given; allowed: 'auto', 'history', 'ranker' or 'none'; "
        "the ranker learns from the same features"
    )
    store = MemoryStore("held")
    resolved = changed(dump(parse(DOCUMENT)), planning__length_predictor="features")
    run = RunRecord(config=resolved, digest=digest(parse(DOCUMENT)), vocab_size=9, model_files={}, created_at_s=0)
    records.put(store, layout.RUN, run)
    found = config_in_force(store, replace(a_plan(), config=resolved))
    assert found.planning.length_predictor == "auto"
