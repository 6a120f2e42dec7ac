"""A run that begins with a version of another run: equal bits with the optimizer, kills, and refusals."""

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from gleaner import main
from storage.clock import ManualClock
from storage.journal.compaction import read_responses
from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout, records
from storage.records.run import connect_to_run, read_plan, read_run
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject, ObjectMissing
from storage.weights.tensor_sets import Manifest, read_manifest
from storage.weights.versions import pull_version
from tasks.configuration.run_config import ConfigError, changes, digest, dump, parse
from tasks.preparing.checks import check_files
from tasks.preparing.iteration import prepare
from tasks.preparing.origin import OriginError
from tasks.sampling.engines.weight_tensors import as_torch
from tasks.sampling.session.pulled_model import pull_model
from tasks.viewing.run_summary import run_facts
from tests.dying_store import DiesAtWrite, Killed
from tests.regraded_run import holding
from tests.small_run import (
    EXECUTION,
    commit_iteration,
    document,
    everything,
    memory_store,
    plan_iteration,
    roll_out,
    train_small,
)
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

OTHER, FORK = "memory://origin-other", "memory://origin-fork"
ITERATIONS, AT = 4, 2
ENGINE = {"engine": "torch", "context_length": 240}
PPO = {"preset": "ppo"}
CRITIC = {"critic": {"warmup_iterations": 3, "optimizer": {"learning_rate": 1e-3}}, "algorithm": PPO}
SCHEDULE = {"learning_rate": 1e-2, "schedule": "linear", "total_steps": 9, "warmup_steps": 2}


class ReadOnly(MemoryStore):
    """A store that nothing may write to."""

    def __init__(self, name, objects):
        super().__init__(name)
        self._objects.update(objects)

    def create(self, key, body):
        raise AssertionError(f"{key} is created")

    def put(self, key, body):
        raise AssertionError(f"{key} is written")

    def delete(self, key):
        raise AssertionError(f"{key} is deleted")


def settings(url, model, **sections):
    """A configuration of our engine; `model` None: that of run.from."""
    run = {"url": url, "seed": 3, "num_prompts_per_step": 4, "num_generations": 3} | sections.pop("run", {})
    given = document(url, model, run=run, rollout=ENGINE, optimizer=sections.pop("optimizer", SCHEDULE), **sections)
    if model is None:
        del given["policy"]
    return parse(given)


def fork(version=AT, model=None, *, optimizer=True, **sections):
    run = {"from": f"{OTHER}@{version}", "from_optimizer": optimizer} | sections.pop("run", {})
    return settings(FORK, model, run=run, **sections)


def trained(config, iterations):
    for iteration in range(iterations):
        plan_iteration(config)
        roll_out(config.run.url, iteration)
        train_small(config.run.url, iteration)
        commit_iteration(config.run.url, iteration)


def run_of(model, **sections):
    """All objects of the other run."""
    store = memory_store("origin-other")
    trained(settings(OTHER, model, **sections), ITERATIONS)
    return everything(store)


@pytest.fixture(scope="module")
def other(model):
    return run_of(model)


@pytest.fixture
def placed(other):
    """The other run, which nothing may write to, and an empty store of the fork."""
    memory_store("origin-other", ReadOnly("origin-other", other))
    return memory_store("origin-fork")


def weights(url, version):
    return {
        name: as_torch(block).clone()
        for name, block in pull_version(connect_to_run(url), version, None, ManualClock())[1].items()
    }


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def tokens(url, iteration):
    rows = read_responses(connect_to_run(url), iteration)
    return [(row.prompt_id, row.token_ids.tolist(), row.logprobs.tobytes(), row.reward) for row in rows]


def test_with_the_optimizer_the_fork_gives_bit_for_bit_what_the_other_run_gave(placed, other):
    trained(fork(), ITERATIONS - AT)
    for iteration in range(ITERATIONS - AT):
        assert tokens(FORK, iteration) == tokens(OTHER, AT + iteration)
    for version in range(ITERATIONS - AT + 1):
        assert same(weights(FORK, version), weights(OTHER, AT + version)), version
    saved = [read_manifest(connect_to_run(url), layout.checkpoint(at)) for url, at in ((FORK, 2), (OTHER, ITERATIONS))]
    assert saved[0].tensors == saved[1].tensors
    states = [each.metadata["trainer_state"] for each in saved]
    assert [state.pop("weight_version") for state in states] == [2, ITERATIONS]
    assert states[0] == states[1]
    assert everything(connect_to_run(OTHER)) == other


@pytest.mark.slow
def test_a_critic_goes_on_too_and_its_warm_up_is_not_repeated(model):
    found = run_of(model, **CRITIC)
    memory_store("origin-other", ReadOnly("origin-other", found))
    store = memory_store("origin-fork")
    trained(fork(**CRITIC), ITERATIONS - AT)
    assert same(weights(FORK, 2), weights(OTHER, ITERATIONS))
    pair = [
        read_manifest(each, layout.critic_checkpoint(at)).tensors
        for each, at in ((store, 2), (connect_to_run(OTHER), ITERATIONS))
    ]
    assert pair[0] == pair[1]


def test_a_fork_of_a_fork_counts_on_from_both(placed):
    trained(fork(), 1)
    held = everything(placed)
    memory_store("origin-fork", ReadOnly("origin-fork", held))
    memory_store("origin-last")
    run = {"from": f"{FORK}@1", "from_optimizer": True}
    trained(settings("memory://origin-last", None, run=run), 1)
    assert read_plan(connect_to_run("memory://origin-last"), 0).counted == AT + 1
    assert same(weights("memory://origin-last", 1), weights(OTHER, AT + 2))


def test_without_the_optimizer_a_new_run_begins_with_the_weights_alone(placed):
    trained(fork(optimizer=False), 1)
    assert same(weights(FORK, 0), weights(OTHER, AT))
    assert not same(weights(FORK, 1), weights(OTHER, AT + 1))
    plan = read_plan(placed, 0)
    assert (plan.counted, plan.first_prompt, placed.list(layout.checkpoint(0))) == (0, 0, [])
    assert read_run(placed).origin.optimizer is None


def test_prompts_of_another_section_begin_with_the_first(placed):
    plan_iteration(fork(data={"source": "arithmetic", "limit": 9}))
    plan = read_plan(placed, 0)
    assert (plan.counted, plan.first_prompt) == (AT, 0)


def test_the_first_record_and_the_page_name_the_version_and_its_digests(placed):
    plan_iteration(fork())
    run, there = read_run(placed), connect_to_run(OTHER)
    origin = run.origin
    assert (origin.url, origin.version, origin.counted_from, origin.first_prompt) == (OTHER, AT, AT, 8)
    assert origin.digest == read_manifest(there, layout.weights(AT)).digest
    assert origin.optimizer == read_manifest(there, layout.checkpoint(AT)).digest
    assert run_facts(run)["begins with"] == origin.text
    assert f"version {AT} of {OTHER}" in origin.text
    plain = replace(run, origin=None)
    assert "begins with" not in run_facts(plain)


def test_check_reads_every_byte_and_says_with_what_the_run_begins(placed):
    line = f"weights: every byte of version {AT} of {OTHER} (digest "
    assert any(each.startswith(line) for each in check_files(fork()))
    assert everything(placed) == {}
    plan_iteration(fork())
    # A run that has begun does not need the other any more.
    memory_store("origin-other")
    assert any("weights: every byte of version 0 of" in each for each in check_files(fork()))


def test_a_begun_run_needs_the_other_run_no_more(placed):
    plan_iteration(fork())
    roll_out(FORK, 0)
    train_small(FORK, 0)
    memory_store("origin-other")
    commit_iteration(FORK, 0)
    assert plan_iteration(fork()).iteration == 1


def test_killed_at_any_write_of_its_beginning_a_run_ends_in_the_same_objects(placed):
    store = memory_store("origin-fork", DiesAtWrite("origin-fork", {}))
    plan_iteration(fork())
    expected = contents(store)
    assert any(key.startswith(layout.checkpoint(0)) for key in store.written)
    order = [store.written.index(layout.manifest(prefix)) for prefix in (layout.checkpoint(0), layout.weights(0))]
    assert order == sorted(order)
    for writes in range(len(store.written)):
        store = memory_store("origin-fork", DiesAtWrite("origin-fork", {}, writes))
        with pytest.raises(Killed):
            prepare(fork(), EXECUTION, ManualClock())
        store.left = 1 << 30
        plan_iteration(fork())
        assert contents(store) == expected, writes


@pytest.mark.parametrize("prefix", [layout.weights(AT), layout.checkpoint(AT)])
def test_a_begun_run_goes_on_with_the_version_of_its_record_and_no_other(other, prefix):
    there, key = holding(other, "origin-other"), layout.manifest(prefix)
    store = memory_store("origin-fork", DiesAtWrite("origin-fork", {}))
    plan_iteration(fork())
    begun = store.written.index(layout.RUN) + 1
    store = memory_store("origin-fork", DiesAtWrite("origin-fork", {}, begun))
    with pytest.raises(Killed):
        prepare(fork(), EXECUTION, ManualClock())
    store.left = 1 << 30
    manifest = records.read(there, Manifest, key)
    records.put(there, key, replace(manifest, metadata={**manifest.metadata, "again": 1}))
    with pytest.raises(OriginError, match=r"digest is [0-9a-f]+; allowed: |is not the one that 'run\.json' names"):
        plan_iteration(fork())
    there.put(key, other[key])
    plan_iteration(fork())
    assert same(weights(FORK, 0), weights(OTHER, AT))


def test_status_names_the_version(placed):
    plan_iteration(fork())
    found = CliRunner().invoke(main, ["status", FORK])
    assert found.output.startswith(f"begins with: version {AT} of {OTHER} (digest ")
    given = json.loads(CliRunner().invoke(main, ["status", FORK, "--json"]).output)
    assert given["lineage"] == {"begins with": read_run(placed).origin.text}


def contents(store):
    """All objects but the lease's beat, with the bytes of manifests: objects of tensors are named by their content."""
    found = {key: body for key, body in everything(store).items() if key != layout.LEASE_BEAT}
    return {key: body if "manifest" in key else b"" for key, body in found.items()}


REFUSED = [
    ({"version": 9}, r"run\.from: value '.*@9'; weight version 9 is not published; allowed: 0 to 4$"),
    ({"version": 0}, r"run\.from_optimizer: value true; allowed with version 0: false, because no optimizer"),
    ({"optimizer": {"name": "muon"}}, r"optimizer\.name: value 'muon'; allowed with run\.from_optimizer: 'adamw'"),
    (
        {"optimizer": {"schedule": "cosine", "total_steps": AT}},
        rf"optimizer\.total_steps: value {AT}; allowed with run\.from_optimizer: more than the {AT} steps of the other",
    ),
    ({"algorithm": PPO}, r"algorithm\.advantage_estimator: value 'gae'; allowed with run\.from_optimizer: one without"),
    ({"run": {"from": "memory://origin-nothing@1"}}, r"run\.from: value '.*@1'; memory://origin-nothing holds no run$"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
@pytest.mark.parametrize("look", [check_files, plan_iteration])
def test_what_cannot_begin_is_refused_in_one_line_and_nothing_is_created(placed, number, look):
    given, line = REFUSED[number]
    config = fork_of(given) if "optimizer" in given else fork(**given)
    with pytest.raises(OriginError, match=line) as refused:
        look(config)
    assert "\n" not in str(refused.value)
    assert everything(placed) == {}


def fork_of(sections):
    run = {"from": f"{OTHER}@{AT}", "from_optimizer": True}
    return settings(FORK, None, run=run, **sections)


def test_a_model_whose_tensors_do_not_fit_is_refused_and_one_that_fits_gives_its_files(placed, model, tmp_path):
    wider = tiny_model(tiny_config(hidden_size=64, intermediate_size=48, num_hidden_layers=1))
    folder = save_tiny_model(tmp_path / "wider", wider)
    with pytest.raises(OriginError, match=r"its tensor 'model\.embed_tokens\.weight' is \[96, 32\], and \[96, 64\] in"):
        check_files(fork(model=folder))
    plan_iteration(fork(model=model))
    assert same(weights(FORK, 0), weights(OTHER, AT))


def test_a_version_of_adapters_is_merged_and_its_optimizer_refused(model):
    there = memory_store("origin-other")
    trained(settings(OTHER, model, lora={"rank": 4, "publish": "adapter"}), 1)
    merged = {
        name: as_torch(block).clone() for name, block in dict(pull_model(there, 1, None, ManualClock())[1]).items()
    }
    store = memory_store("origin-fork")
    with pytest.raises(OriginError, match=r"run\.from_optimizer: value true; allowed with a version of adapters"):
        plan_iteration(fork(1))
    assert everything(store) == {}
    plan_iteration(fork(1, optimizer=False))
    assert same(weights(FORK, 0), merged)
    assert not same(weights(OTHER, 0), merged)


def test_a_version_without_a_checkpoint_is_refused_with_the_optimizer_alone(other, model):
    store = holding(other, "origin-other")
    sweep(store, RetentionConfig(keep_checkpoints=1, keep_weights=4))
    memory_store("origin-fork")
    with pytest.raises(OriginError, match=r"checkpoint 2 was deleted .*; allowed: 4$"):
        plan_iteration(fork())
    plan_iteration(fork(optimizer=False))


def test_a_damaged_tensor_of_the_other_run_is_refused(other):
    store = holding(other, "origin-other")
    for key in store.list(layout.checkpoint(AT)):
        if key.endswith(".safetensors"):
            body = bytearray(store.get(key))
            body[-1] ^= 1
            store.put(key, bytes(body))
    fresh = memory_store("origin-fork")
    with pytest.raises(CorruptObject):
        plan_iteration(fork())
    assert everything(fresh) == {}


def test_a_lost_first_checkpoint_ends_a_replay_instead_of_beginning_without_it(placed):
    trained(fork(), 1)
    for key in [*placed.list(layout.checkpoint(0)), *placed.list(layout.checkpoint(1))]:
        placed.delete(key)
    with pytest.raises(ObjectMissing, match="checkpoints/00000000"):
        plan_iteration(fork())


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"run": {"from": f"{FORK}@1"}}, r"run\.from: value .*; allowed: a version of another run than run\.url"),
        ({"run": {"from": f"{FORK}/below@1"}}, r"run\.from: value .*; allowed: a version of another run"),
        ({"run": {"from": OTHER}}, r"run\.from: value .*; allowed: <url>@<version>, such as s3://bucket/run@12"),
        ({"run": {"from": None}}, r"run\.from_optimizer: value true; allowed: false, or true with run\.from"),
        ({"lora": {"rank": 4}}, r"run\.from_optimizer: value true; allowed with lora: false"),
        ({"run": {"from_": "x"}}, r"run\.from_: unknown field; did you mean 'from'"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_as_such(model, sections, line):
    with pytest.raises(ConfigError, match=line):
        fork(model=model, **sections)


def test_the_origin_is_part_of_a_runs_identity_and_absent_in_other_runs(model):
    plain, forked = settings(FORK, model), fork(model=model)
    assert parse(dump(forked)) == forked
    assert digest(plain) != digest(forked)
    assert changes(plain, forked) == [
        f'run.from: null here, "{OTHER}@{AT}" there',
        "run.from_optimizer: false here, true there",
    ]
