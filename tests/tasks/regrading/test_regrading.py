"""Responses graded again: equal rewards give equal bits, killed graders go on, and nothing of the run changes."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace

import pytest

from examples.tools_warm_start import chat_tokenizer
from resources import user_process
from storage.journal.retention import settle, sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout, records
from storage.records.gradings import GradedRecord, GradingRecord, gradings, read_graded
from storage.records.records import BatchRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.grading.reward import GradingError
from tasks.regrading.regrading import regrade
from tests.chat_tokenizers import written
from tests.dying_store import DiesAtWrite, Killed
from tests.forked import ForkedWorker
from tests.memorised_policy import memorised
from tests.regraded_run import REWARDS, as_recorded, bits, differences, grades, holding, trained
from tests.small_run import config, everything, memory_store, model_directory
from tests.tasks.grading.tiny_reward_model import save_reward_model

pytestmark = pytest.mark.slow

URL = "memory://regraded"
BOTH = range(2)
FORMAT = [{"function": "format", "arguments": {"pattern": ".{130,}"}, "weight": 0.5}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module")
def objects(model):
    return trained("regraded", model, 2, rewards=REWARDS)


@pytest.fixture
def store(objects):
    return holding(objects, "regraded")


@pytest.fixture
def own(model):
    """The run's own configuration."""
    return config(URL, model, rewards=REWARDS)


def other(own: RunConfig, *rewards: Mapping[str, object]) -> RunConfig:
    return config(own.run.url, own.policy.path, rewards=list(rewards or FORMAT))  # type: ignore[arg-type]


def test_equal_rewards_give_equal_bits_from_the_journal_and_from_parts(store, own):
    settle(store, 0)
    assert store.list(layout.journal(0)) == []
    before = everything(store)
    assert regrade(store, own, BOTH, "again") == [0, 1]
    found = [as_recorded(store, iteration) for iteration in BOTH]
    assert grades(store, "again", BOTH) == list(map(bits, found))
    assert all(record.reward_errors for record in found)
    assert len({value for record in found for value in record.rewards["counts_calls"]}) > 12
    assert list(differences(before, store, "again")) == []


def test_equal_rewards_give_equal_bits_where_groups_were_filtered(model):
    rewards = [*REWARDS[1:2], {"function": "tests.reward_functions:counts_calls", "weight": 0.0}]
    sections = {"rewards": rewards, "algorithm": {"filter_groups": True}, "run": {"num_prompts_per_step": 2}}
    store = holding(trained("filtered", model, 1, **sections), "filtered")
    batches = [records.read(store, BatchRecord, key) for key in store.list(layout.batches(0))]
    assert any(batch.filtered for batch in batches)
    regrade(store, config(store.url, model, **sections), [0], "again")
    assert grades(store, "again", range(1)) == [bits(as_recorded(store, 0))]


def test_equal_rewards_give_equal_bits_in_conversations_that_are_not_held_again(tmp_path):
    rows = tmp_path / "drawers.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "f"}], "digit": 3}) + "\n")
    text = "?f!<eos>3=#3<eos>"
    sections = {
        "data": {"source": str(rows)},
        "run": {"num_prompts_per_step": 2},
        "turns": {"environment": "tests.tasks.turns.environments_for_evaluation:Drawer"},
        "rewards": [
            {"function": "environment"},
            {"function": "tests.reward_functions:messages_seen", "weight": 0.25},
            {"function": "length", "arguments": {"free_tokens": 0, "scale_tokens": 90}},
        ],
        "sampling": {"max_completion_length": 24},
        "rollout": {"engine": "torch", "dtype": "float32", "context_length": 64},
    }
    policy = memorised(tmp_path / "model", text)
    store = holding(trained("turns", policy, 1, **sections), "turns")
    settle(store, 0)
    regrade(store, config(store.url, policy, **sections), [0], "again")
    wanted = as_recorded(store, 0)
    assert grades(store, "again", range(1)) == [bits(wanted)]
    assert max(value or 0.0 for value in wanted.rewards["messages_seen"]) >= 4
    said = len(written(chat_tokenizer(), text))
    assert min(value or 0.0 for value in wanted.rewards["length"]) > -said / 90  # the observation is free


def test_a_reward_model_of_the_run_is_read_from_its_copy_and_another_from_its_folder(model, tmp_path, monkeypatch):
    monkeypatch.setattr(user_process, "start", ForkedWorker)
    folder, moved = save_reward_model(tmp_path / "judge"), tmp_path / "moved"
    judge = {"function": "reward_model", "name": "judge", "model": str(folder), "time_limit_s": 60.0}
    store = holding(trained("judged", model, 1, rewards=[judge]), "judged")
    folder.rename(moved)
    regrade(store, config(store.url, model, rewards=[judge]), [0], "again")
    assert grades(store, "again", range(1)) == [bits(as_recorded(store, 0))]
    # The same files elsewhere are the same reward, and others are others.
    regrade(store, config(store.url, model, rewards=[judge | {"model": str(moved)}]), [0], "again")
    shutil.rmtree(moved)
    save_reward_model(moved, num_labels=2)
    second = config(store.url, model, rewards=[judge | {"model": str(moved), "label": 1}])
    with pytest.raises(ConflictingRecord, match=r"others \(judge\.label is None there and 1 here\)"):
        regrade(store, second, [0], "again")
    regrade(store, second, [0], "second")
    assert grades(store, "second", range(1)) != grades(store, "again", range(1))
    with pytest.raises(
        GradingError, match=r"^rewards\.judge\.model: value '.*none'; allowed: a folder, an id on the hub"
    ):
        regrade(store, config(store.url, model, rewards=[judge | {"model": str(folder / "none")}]), [0], "third")
    assert gradings(store) == ["again", "second"]


def test_other_rewards_stand_beside_the_runs_own(store, own):
    before = everything(store)
    regrade(store, other(own), [1], "rubric")
    record = read_graded(store, "rubric", 1)
    assert list(record.rewards) == ["format"]
    assert record.reward == tuple(0.5 * (value or 0.0) for value in record.rewards["format"])
    assert set(record.rewards["format"]) == {0.0, 1.0}
    assert list(differences(before, store, "rubric")) == []
    assert gradings(store) == ["rubric"]
    assert regrade(store, other(own), BOTH, "rubric") == [0]


def test_a_name_belongs_to_its_rewards(store, own):
    regrade(store, other(own), [0], "rubric")
    before = everything(store)
    for rewards, difference in [
        ([FORMAT[0] | {"weight": 0.25}], r"format\.weight is 0\.5 there and 0\.25 here"),
        ([FORMAT[0] | {"arguments": {"pattern": "x"}}], r"format\.arguments is .* there and .* here"),
        ([*FORMAT, *REWARDS[-1:]], "format there and format, length here"),
    ]:
        for iterations in (range(1), BOTH):
            with pytest.raises(
                ConflictingRecord, match=rf"^name: value 'rubric', whose rewards are others \({difference}"
            ):
                regrade(store, other(own, *rewards), iterations, "rubric")
    regrade(store, other(own, FORMAT[0] | {"time_limit_s": 3.0}), [0], "rubric")  # as long as it is in time
    assert everything(store) == before


def test_code_that_has_changed_is_another_reward(store, own, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    code = tmp_path / "rubric_of_test.py"
    code.write_text("def score(solution_str): return 1.0\n")
    settings = other(own, {"function": "rubric_of_test:score"})
    assert regrade(store, settings, [0], "rubric") == [0]
    code.write_text("def score(solution_str): return 2.25\n")
    with pytest.raises(ConflictingRecord, match=r"score\.source is '\w{32}' there and '\w{32}' here"):
        regrade(store, settings, [0], "rubric")
    assert set(read_graded(store, "rubric", 0).reward) == {1.0}
    assert regrade(store, settings, [0], "second") == [0]
    assert set(read_graded(store, "second", 0).reward) == {2.25}


def test_a_grader_that_is_killed_at_any_write_goes_on_where_it_stood(objects, own):
    whole = DiesAtWrite("regraded", objects)
    regrade(whole, own, BOTH, "again")
    writes = len(whole.written)
    wanted = everything(whole)
    for write in range(writes):
        store = DiesAtWrite("regraded", objects, write)
        with pytest.raises(Killed):
            regrade(store, own, BOTH, "again")
        store.left = 1 << 30
        done = [iteration for iteration in BOTH if layout.graded("again", iteration) in store.list("")]
        assert regrade(store, own, BOTH, "again") == [iteration for iteration in BOTH if iteration not in done]
        assert everything(store) == wanted
    assert [key for key in whole.written if "000000" in key] == [layout.graded("again", 0)]


def test_a_swept_run_is_graded_as_before(store, own):
    regrade(store, own, BOTH, "again")
    wanted = grades(store, "again", BOTH)
    before = {key: body for key, body in everything(store).items() if key.startswith(layout.GRADINGS)}
    swept = sweep(store, RetentionConfig())
    assert swept.compacted
    assert {key: body for key, body in everything(store).items() if key.startswith(layout.GRADINGS)} == before
    regrade(store, own, BOTH, "swept")
    assert grades(store, "swept", BOTH) == wanted


def test_rewards_that_cannot_grade_take_no_name(store, own):
    before = everything(store)
    for rewards, error in [
        ([{"function": "tests.reward_functions:needs_a_column"}], "iteration 0: missing reward column"),
        ([{"function": "tests.reward_functions:nothing"}], "iteration 0: reward .* has no 'nothing'"),
    ]:
        with pytest.raises(GradingError, match=error):
            regrade(store, other(own, *rewards), BOTH, "rubric")
    failing = [{"function": "tests.reward_functions:no_multiples_of_three", "on_failure": "stop"}]
    with pytest.raises(GradingError, match="iteration 0: reward no_multiples_of_three of response"):
        regrade(store, other(own, *failing), BOTH, "rubric")
    assert everything(store) == before


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/a", ".a", "-a", "a b", "a\n", "ä", "a" * 101, "a\0"])
def test_a_name_that_is_no_part_of_a_key_is_refused_before_anything_is_read(own, name):
    with pytest.raises(ValueError, match=r"^name: value .*; allowed: up to 100 letters, digits"):
        regrade(MemoryStore("empty"), own, BOTH, name)


def test_a_part_and_a_batch_that_are_damaged_are_named(store, own):
    settle(store, 0)
    [part] = store.list(layout.responses_parts(0))
    body = store.get(part)
    store.put(part, body[:-40] + body[-39:] + b"x")
    with pytest.raises(CorruptObject, match=part):
        regrade(store, other(own), BOTH, "rubric")
    store.put(part, body)
    key = layout.batch(0, 0)
    batch = records.read(store, BatchRecord, key)
    [first, *rest] = batch.responses
    records.put(store, key, replace(batch, responses=(replace(first, reward=17.0), *rest)))
    with pytest.raises(CorruptObject, match=f"response {first.response} is not what the batches say"):
        regrade(store, other(own), BOTH, "rubric")
    assert gradings(store) == []


class WithRival(MemoryStore):
    """A store in which another grader stores an object a moment earlier."""

    def __init__(self, objects: Mapping[str, bytes], key: str, theirs: bytes) -> None:
        super().__init__("regraded")
        self._objects.update(objects)
        self.key, self.theirs = key, theirs

    def create(self, key: str, body: bytes) -> bool:
        self._rival(key)
        return super().create(key, body)

    def put(self, key: str, body: bytes) -> None:
        self._rival(key)
        super().put(key, body)

    def _rival(self, key: str) -> None:
        if key == self.key:
            super().create(key, self.theirs)


def wrong_beside_a_rival(objects: Mapping[str, bytes], own: RunConfig) -> list[str]:
    """What is wrong after a grading whose values no call gives twice, of which another process stored the first."""
    settings = other(own, {"function": "tests.reward_functions:answers_at_random"})
    first = holding(objects, "regraded")
    regrade(first, settings, [0], "again")
    key = layout.graded("again", 0)
    store = WithRival(objects, key, first.get(key))
    regrade(store, settings, [0], "again")
    return list(differences({**objects, store.key: store.theirs}, store, "again"))


def test_the_first_of_two_graders_decides(objects, own):
    assert wrong_beside_a_rival(objects, own) == []


def test_a_name_that_another_process_gives_to_other_rewards_meanwhile_is_refused(objects, own):
    first, key = holding(objects, "regraded"), layout.grading("again")
    regrade(first, own, [0], "again")
    store = WithRival(objects, key, first.get(key))
    with pytest.raises(ConflictingRecord, match=r"^name: value 'again', whose rewards are others"):
        regrade(store, other(own), [0], "again")
    assert everything(store) == {**objects, key: store.theirs}


def test_responses_that_are_recorded_in_any_order_are_graded_in_theirs(store, own):
    key = layout.batch(0, 0)
    batch = records.read(store, BatchRecord, key)
    records.put(store, key, replace(batch, responses=batch.responses[::-1]))
    regrade(store, other(own, REWARDS[0]), [0], "reversed")
    regrade(store, other(own), [0], "rubric")
    record = read_graded(store, "reversed", 0)
    assert record.responses == tuple(range(12))
    assert read_graded(store, "rubric", 0).responses == record.responses
    wanted = as_recorded(store, 0).rewards["counts_calls"]
    assert record.rewards["counts_calls"] == pytest.approx(wanted)


def test_a_planted_bug_a_grading_that_overwrites_is_found(objects, own, monkeypatch):
    def overwrite(store: ObjectStore, key: str, record: GradedRecord | GradingRecord) -> bool:
        records.put(store, key, record)
        return True

    monkeypatch.setattr("tasks.regrading.regrading.records.commit", overwrite)
    assert wrong_beside_a_rival(objects, own) == [f"{layout.graded('again', 0)} is another"]


def test_the_run_of_the_store_in_use_is_not_needed(objects, own):
    """The configuration's own run.url plays no part: the store is the run."""
    store = holding(objects, "elsewhere")
    memory_store("regraded")
    regrade(store, own, [0], "again")
    assert grades(store, "again", range(1)) == [bits(as_recorded(store, 0))]
