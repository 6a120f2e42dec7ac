"""The rights of a joined machine, as the guide's table grants them, and the worst that it can do with them."""

import fnmatch
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from storage.clock import SystemClock
from storage.fleet import fleet_layout
from storage.journal.claims import ClaimBook
from storage.journal.shard import Finish, Origin, Row, encode_shard
from storage.journal.turns import CallRecord, TurnRecord, encode_turn
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import ClaimRecord, SettingsRecord
from storage.records.run import read_plan, read_run
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, StoreDenied
from tasks.sampling.session.join import JoinLimits, join_run
from tests.small_run import (
    commit_iteration,
    config,
    everything,
    learned,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "elastic.md"
GRANT = re.compile(r"^\| `<prefix>/(\S+)` \| s3:PutObject \|.*; (created once|overwritten) \|$", re.MULTILINE)
GRANTED = GRANT.findall(GUIDE.read_text())
STRANGER = "00009-0123456789abcdef"
EVIL = "planted_by_a_joined_machine:run"
OF_MEMBERS = (layout.claims, layout.journal, layout.environment_states, layout.asks, layout.alive_all)
# What the product writes to a run, but for what the table grants.
OTHERS = (
    layout.RUN,
    layout.METRICS,
    layout.LEASE_BEAT,
    layout.lease(1),
    layout.model_file("config.json"),
    layout.source_rows("0" * 32),
    layout.manifest(layout.weights(1)),
    layout.delta_manifest(layout.weights(1)),
    layout.tensor_object(layout.weights(1), "0" * 32),
    layout.manifest(layout.checkpoint(1)),
    layout.reward_model("judge"),
    layout.reward_model_chunk("0" * 32),
    layout.lengths(0),
    layout.forecast("0" * 32),
    layout.evaluation("00000001-0"),
    layout.evaluation_directory("00000001-0") + layout.RUN,
    layout.settings(0),
    layout.plan(0),
    layout.prompts(0, "0" * 32),
    layout.ended(0, "0" * 32) + "rollout.json",
    layout.failure("train"),
    f"{layout.STANDING}{fleet_layout.FLEET}",
    f"{layout.STANDING}{fleet_layout.seat('0' * 16, 1)}",
    f"{layout.STANDING}{fleet_layout.alive('host')}",
    layout.slot_failure("0" * 32, 0, 0),
    layout.batch(0, 0),
    f"{layout.batches(0)}claims/000000.json",
    layout.closed(0),
    layout.collected(0),
    layout.due(0),
    layout.responses(0),
    layout.responses_part(0, 0, 1),
    layout.training(0),
    layout.nonfinite(0),
    layout.phase_failure(0),
    layout.report(0),
    layout.deck(0),
)


def may_put(key):
    """Whether the table lets a joined machine write the key; "*" and "?" are as in a policy, which knows no folders."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern, _ in GRANTED)


class Policed(MemoryStore):
    """A store with the table as its policy, once `enforced`."""

    enforced = False

    def create(self, key, body):
        if self.enforced and not may_put(key):
            raise StoreDenied(f"create {key}")
        return super().create(key, body)

    def put(self, key, body):
        if self.enforced and (not may_put(key) or dict(GRANTED)[_pattern(key)] == "created once"):
            raise StoreDenied(f"put {key}")
        super().put(key, body)

    def delete(self, key):
        if self.enforced:
            raise StoreDenied(f"delete {key}")
        super().delete(key)


def _pattern(key):
    return next(pattern for pattern, _ in GRANTED if fnmatch.fnmatchcase(key, pattern))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A module that leaves a file where it is imported in any process; returns the file's path."""
    mark = tmp_path / "it-ran"
    body = f"import pathlib\npathlib.Path({str(mark)!r}).write_text('it ran')\ndef run(*args, **given):\n    return 0\n"
    (tmp_path / "planted_by_a_joined_machine.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return mark


def test_the_table_grants_what_a_member_writes_and_nothing_that_says_what_runs_or_what_is_learned():
    assert [pattern.replace("??????", "000000") for pattern, _ in GRANTED] == [f"{of(0)}*" for of in OF_MEMBERS]
    assert [key for key in OTHERS if may_put(key)] == []


def test_a_joined_machine_needs_no_more_than_the_table_grants(model):
    store = memory_store("granted", Policed("granted"))
    plan_iteration(config("memory://granted", model))
    before = {*store.list("")}
    store.enforced = True
    assert join_run("memory://granted", JoinLimits(iterations=1, patience_s=0.1), lambda: False, SystemClock()) == 1
    written = {_pattern(key) for key in {*store.list("")} - before}
    assert len(written) == 3  # there are no environments, and there is no other member to ask
    store.enforced = False
    train_small("memory://granted", 0)


def worst(store, plan):
    """Create and overwrite all that the table grants, with what names functions where a reader could look for them."""
    evil = json.loads(json.dumps(read_run(store).config))
    evil["rewards"] = [{"function": EVIL}]
    evil["turns"] = {"tools": [EVIL], "environment": EVIL, "agent": EVIL}
    evil["algorithm"]["advantage_estimator"] = EVIL
    settings = SettingsRecord(config=evil, execution="test", ends_execution=True)
    call = CallRecord(
        call_id="0", name="__import__", arguments=EVIL, result="", outcome="answered", unknown=False, seconds=0
    )
    event = encode_turn(TurnRecord(turn=0, calls=(call,), seconds=0, reward=1e9, state={"function": EVIL}))
    no_tokens = {"token_ids": (), "logprobs": ()}
    rows = [Row(0, 1, 0, **no_tokens, weight_version=0, finish=Finish.RUNNING, origin=Origin.OBSERVATION, event=event)]
    bodies = {
        layout.shard(0, STRANGER, 0): encode_shard(rows),
        layout.ask(0, STRANGER, 0): json.dumps(evil).encode(),
        layout.environment_state(0, "0" * 32): json.dumps({"function": EVIL}).encode(),
        f"{layout.claims(0)}{EVIL.replace(':', '.')}/000001.json": json.dumps(evil).encode(),
        f"{layout.claims(0)}report.json": b"{}",
    }
    names = ("settings.json", "plan.json", "report.json", "closed.json", "training.json", "batches/000000.json")
    for folder in (of(0) for of in OF_MEMBERS):
        for name in names:
            bodies[f"{folder}{name}"] = records.encode(f"{folder}{name}", settings)
    for incarnation in {key.rpartition("/")[2].removesuffix(".json") for key in store.list(layout.alive_all(0))}:
        beat = HeartbeatRecord(
            incarnation=incarnation,
            slot=0,
            state="gone",
            beat=1 << 60,
            pool="rollout",
            host=EVIL,
            pid=1,
            started_at_s=0,
            updated_at_s=1,
            tokens_generated=0,
            tokens_recovered=0,
            prefill_tokens=0,
            responses_finished=0,
            engine=EVIL,
            batch_invariant=True,
        )
        store.put(layout.alive(0, incarnation), records.encode(layout.alive(0, incarnation), beat))
    for key, body in bodies.items():
        assert store.create(key, body), key
    for key in store.list(""):
        if may_put(key) and "/alive/" not in key:
            with pytest.raises(StoreDenied):
                store.put(key, b"other")
    assert plan.iteration == 0
    with pytest.raises(StoreDenied):
        store.put(layout.settings(0), records.encode(layout.settings(0), settings))
    with pytest.raises(StoreDenied):
        store.create("iterations/000000/settings.json", b"{}")


@pytest.mark.slow
def test_the_worst_that_a_joined_machine_can_write_runs_nothing_and_teaches_nothing(model, planted):
    """Nothing of it is called, and training, report and weights are those of the run that it let alone."""
    found = {}
    for name in ("alone", "visited"):
        url = f"memory://{name}"
        store = memory_store(name, Policed(name))
        plan_iteration(config(url, model))
        roll_out(url, 0)
        if name == "visited":
            store.enforced = True
            worst(store, read_plan(store, 0))
            store.enforced = False
        trained = learned(train_small(url, 0).metrics)
        report = commit_iteration(url, 0)
        weights = {key: body for key, body in everything(store).items() if key.startswith(layout.weights(1))}
        found[name] = trained, report.rewards, report.lengths, {key: weights[key] for key in weights if "safe" in key}
    assert found["visited"] == found["alone"]
    assert not planted.exists()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["settings of version 0.1.0", "the plan"])
def test_a_policy_that_grants_the_whole_iteration_lets_it_stop_a_run_and_not_choose_what_runs(model, planted, what):
    url = "memory://broad"
    store = memory_store("broad")
    plan_iteration(config(url, model))
    roll_out(url, 0)
    if what == "the plan":
        plan = read_plan(store, 0)
        records.put(store, layout.plan(0), replace(plan, config={**plan.config, "rewards": [{"function": EVIL}]}))
        with pytest.raises(
            ConflictingRecord, match=r"plan\.json has another configuration [\s\S]*\n  rewards\.0\.function"
        ):
            train_small(url, 0)
    else:
        key = "iterations/000000/settings.json"
        settings = SettingsRecord(config={**read_run(store).config, "rewards": [{"function": EVIL}]}, execution="test")
        store.put(key, records.encode(key, settings))
        train_small(url, 0)
    assert not planted.exists()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"unit": 1}, "it is the claim of unit 1, epoch 1"),
        ({"unit": -1}, "it is the claim of unit -1, epoch 1"),
        ({"epoch": 2}, "it is the claim of unit 0, epoch 2"),
        ({"incarnation": "../../../run"}, "incarnation '../../../run'; allowed: a part of a key"),
        ({"sealed": {"a/b": 0}}, "incarnation 'a/b'; allowed: a part of a key"),
        ({"incarnation": "sk-" * 100_000}, f"incarnation '{('sk-' * 67)[:200]}'; allowed: a part of a key"),
    ],
)
def test_a_claim_that_lies_about_itself_is_refused_by_all_readers(model, fields, named):
    store = memory_store("claims")
    plan_iteration(config("memory://claims", model))
    claim = {"unit": 0, "epoch": 1, "incarnation": STRANGER, "slot": 9, "responses": None, "sealed": {}} | fields
    records.put(store, layout.claim(0, 0, 1), ClaimRecord(**claim))
    for read in (ClaimBook.refresh, lambda book: book.probe(0)):
        with pytest.raises(CorruptObject, match=re.escape(named)):
            read(ClaimBook(store, read_plan(connect("memory://claims"), 0)))
