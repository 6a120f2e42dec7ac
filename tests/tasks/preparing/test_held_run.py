"""What `gleaner check --files` says of a run or a fleet that is already where the configuration points."""

from dataclasses import replace

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.records import ReportRecord
from storage.records.run import read_run
from storage.stores.store import ConflictingRecord, StoreDenied
from tasks.configuration.run_config import digest, parse
from tasks.preparing.checks import check_files
from tasks.preparing.findings import Refusals
from tasks.preparing.held_run import check_held_run
from tasks.preparing.iteration import prepare
from tests.small_run import Unreachable, config, document, everything, memory_store

URL = "memory://held"
OWN = [{"function": "tests.reward_functions:beginning_with", "arguments": {"n": 3}}]


@pytest.fixture
def store(model):
    held = memory_store("held")
    prepare(config(URL, model, rewards=OWN), "test", ManualClock())
    return held


def test_a_run_of_other_settings_is_refused_with_each_difference_and_with_all_else(store, model):
    before = everything(store)
    arguments = [OWN[0] | {"arguments": {"n": 4}}]
    other = document(URL, model, rewards=arguments, data={"source": "none.jsonl"}, optimizer={"learning_rate": 0.5})
    with pytest.raises(Refusals) as refused:
        check_files(parse(other))
    held, data = refused.value.errors
    assert isinstance(held, ConflictingRecord)
    lines = str(held).splitlines()
    assert lines[0] == f"{URL} holds a run of another configuration; nothing was changed:"
    assert "  optimizer.learning_rate: 0.5 here, 0.01 there" in lines
    assert "  rewards.0.arguments.n: 4 here, 3 there" in lines
    assert str(data).startswith("data.source: value 'none.jsonl'")
    assert everything(store) == before


def test_the_same_run_may_go_on_elsewhere_and_at_another_pace(store, model):
    elsewhere = document(URL, model, rewards=OWN, pools={"rollout": {"count": 7}})
    elsewhere["rollout"]["flush_interval_s"] = 1.0
    assert not any("held" in line for line in check_files(parse(elsewhere)))


def test_a_run_that_was_begun_with_floats_of_the_console_goes_on(store, model):
    begun = read_run(store)
    begun.config["rewards"][0]["arguments"] = {"n": 3.0}
    store.put(layout.RUN, records.encode(layout.RUN, replace(begun, digest="0" * 32)))
    settings = config(URL, model, rewards=OWN)
    assert read_run(store).digest != digest(settings)
    check_files(settings)
    assert prepare(settings, "test", ManualClock())[0].iteration == 0


@pytest.mark.parametrize(
    ("restore_s", "placement", "is_told"), [(21.0, "own", True), (1.0, "own", False), (21.0, "standing", False)]
)
def test_a_trainer_that_has_spent_long_on_its_state_is_advised_to_stand(store, model, restore_s, placement, is_told):
    measured = {"timing_s/iteration": 47.0, "timing_s/restore": restore_s}
    report = ReportRecord(
        iteration=0,
        weight_version=1,
        next_prompt=0,
        metrics=measured,
        rewards=(),
        lengths=(),
        lives=(),
        train_started_at_s=0.0,
        train_ended_at_s=1.0,
        created_at_s=2.0,
    )
    records.put(store, layout.report(0), report)
    settings = config(URL, model, rewards=OWN, trainer={"placement": placement})
    said = "trainer.placement: value 'own'; in iteration 0 restoring and writing the trainer's state takes 21 s"
    assert [line.startswith(said) for line in check_held_run(settings)] == [True] * is_told


def test_a_store_out_of_reach_is_a_doubt_and_a_path_that_cannot_be_one_is_refused(model, tmp_path):
    memory_store("held", Unreachable("held"))
    assert (
        check_files(config(URL, model))[-1]
        == f"not sure: run.url: what {URL} holds cannot be seen from here: no answer"
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreDenied, match=r"^run\.url: .*Not a directory"):
        check_files(config(str(tmp_path / "file" / "run"), model))


def test_a_fleet_that_is_none_is_refused(model):
    memory_store("held")
    memory_store("no-fleet")
    settings = config(URL, model, trainer={"placement": "shared", "fleet": "memory://no-fleet"})
    with pytest.raises(LookupError, match=r"^trainer\.fleet: memory://no-fleet holds no fleet; make one by"):
        check_files(settings)


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"sampling": {"max_completion_length": 4096}},
            "sampling.max_completion_length: value 4096; allowed: less than",
        ),
        (
            {"evaluation": {"data": {"source": "arithmetic", "limit": 3}, "sampling": {"max_completion_length": 4096}}},
            "evaluation.sampling.max_completion_length: value 4096; allowed: less than the context",
        ),
        (
            {"evaluation": {"data": {"source": "none.jsonl"}}},
            "evaluation.data.source: value 'none.jsonl'; allowed: 'arithmetic', or an existing",
        ),
    ],
)
def test_what_cannot_fit_is_named_with_its_section(model, sections, line):
    memory_store("held")
    with pytest.raises(ValueError, match=r"[\s\S]") as refused:
        check_files(config(URL, model, **sections))
    assert str(refused.value).startswith(line)
    assert len(str(refused.value).splitlines()) == 1


def test_a_run_goes_on_with_the_optimizer_with_which_it_began(store, model):
    """Its default is younger than runs that go on, so it is absent from what they are identified by."""
    other = document(URL, model, rewards=OWN, optimizer={"name": "muon"})
    with pytest.raises(ConflictingRecord) as refused:
        check_files(parse(other))
    assert '  optimizer.name: "muon" here, "adamw" there' in str(refused.value).splitlines()
    assert digest(parse(other)) != digest(config(URL, model, rewards=OWN))
    named = document(URL, model, rewards=OWN, optimizer={"name": "adamw"}, trainer={"offload": "optimizer"})
    assert digest(parse(named)) == digest(config(URL, model, rewards=OWN))
    assert [line for line in check_files(parse(named)) if "trainer.offload" in line]
