"""Bad input: one clear error that names what is wrong, before anything is created, and a store left as it was."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from resources import user_process
from resources.prices import UnknownMachine
from storage.clock import ManualClock
from storage.records import layout
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, StoreDenied, StoreUnfit
from tasks.configuration.run_config import ConfigError
from tasks.grading.reward import GradingError
from tasks.learning.pretrained import ModelError
from tasks.preparing.iteration import prepare
from tasks.prompts.prompt import PromptError
from tasks.sampling.engines.engine import EngineError
from tests.forked import ForkedWorker
from tests.small_run import (
    config,
    everything,
    memory_store,
    plan_iteration,
    roll_out,
    train_small,
)

ROOT = Path(__file__).parents[1]
URL = "memory://bad-input"


@pytest.fixture
def store():
    return memory_store("bad-input")


def refused(kind, match, settings, url=URL):
    """`settings` are refused by the plan task with one line, and the store at `url` is what it was."""
    store = connect(url)
    before = everything(store)
    with pytest.raises(kind, match=match) as caught:
        prepare(settings, "test", ManualClock())
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert everything(store) == before


def rows(tmp_path, *documents, name="rows.jsonl"):
    file = tmp_path / name
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(file)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"run": {"sede": 1}}, "  run.sede: unknown field; did you mean 'seed'?"),
        ({"run": {"num_generations": 0}}, "  run.num_generations: 0 given; input should be greater than or equal to 1"),
        (
            {"run": {"num_generations": 1}},
            "  run.num_generations: value 1; allowed without data.source 'submitted': at",
        ),
        ({"sampling": {"temperature": "hot"}}, '  sampling.temperature: "hot" given; input should be a valid number'),
        ({"rewards": []}, "  rewards: [] given;"),
        ({"rollout": {"engine": "vlm"}}, "  rollout.engine: \"vlm\" given; input should be 'auto', 'torch', 'vllm' or"),
        ({"optimizer": {"schedule": "cosine"}}, "  optimizer.total_steps: value null; allowed: an integer >= 1 with"),
    ],
)
def test_a_configuration_that_is_not_understood(model, store, sections, message):
    with pytest.raises(ConfigError) as caught:
        config(URL, model, **sections)
    title, *problems = str(caught.value).splitlines()
    assert title == "the configuration is not a valid run configuration:"
    assert len(problems) == 1
    assert problems[0].startswith(message)
    assert store.list("") == []


def test_a_prompt_longer_than_the_context(model, store):
    settings = config(URL, model, sampling={"max_completion_length": 250})
    refused(
        PromptError,
        r"^prompt '\d' has \d+ tokens; allowed: 6 \(rollout.context_length 256 less sampling.max_completion",
        settings,
    )


def test_a_prompt_that_only_a_later_iteration_would_draw_is_refused_now(model, store, tmp_path):
    documents = [{"prompt": "1+1", "worked": "2"}] * 30 + [{"prompt": "1" * 220, "worked": "2"}]
    data = {"source": rows(tmp_path, *documents), "shuffle": False}
    refused(PromptError, "^prompt '30' has 220 tokens; allowed: 216 ", config(URL, model, data=data))


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.parquet"])
def test_an_empty_dataset(model, store, tmp_path, name):
    if name == "empty.jsonl":
        (tmp_path / name).write_text("\n\n")
    else:
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / name)
    source = str(tmp_path / name)
    refused(PromptError, f"^data.source: {source} has no rows$", config(URL, model, data={"source": source}))


def test_an_empty_dataset_on_disk(model, store, tmp_path):
    import datasets  # noqa: PLC0415 - takes a second

    datasets.Dataset.from_dict({"prompt": []}).save_to_disk(str(tmp_path / "empty"))
    settings = config(URL, model, data={"source": str(tmp_path / "empty")})
    refused(PromptError, "^data.source: .*empty has no rows$", settings)


def test_a_dataset_that_is_not_there(model, store, tmp_path):
    settings = config(URL, model, data={"source": str(tmp_path / "none.jsonl")})
    refused(
        PromptError, r"^data.source: value '.*none\.jsonl'; allowed: 'arithmetic', or an existing \.csv, ", settings
    )


def test_a_missing_prompt_column(model, store, tmp_path):
    settings = config(URL, model, data={"source": rows(tmp_path, {"question": "1+1"})})
    refused(
        PromptError,
        r"^data.prompt_column: .*rows\.jsonl: line 1 has no column 'prompt'; there are: 'question'",
        settings,
    )


@pytest.mark.parametrize(
    ("function", "column"), [("tests.reward_functions:needs_a_column", "'difficulty'"), ("arithmetic", "'worked'")]
)
def test_a_missing_reward_column(model, store, tmp_path, function, column):
    data = {"source": rows(tmp_path, {"prompt": "1+1", "answer": "2"})}
    settings = config(URL, model, data=data, rewards=[{"function": function}])
    refused(GradingError, f"^missing reward column: .* needs {column}; there are: 'answer'$", settings)


def test_a_reward_column_that_only_some_rows_have(model, store, tmp_path):
    data = {"source": rows(tmp_path, {"prompt": "1+1", "worked": "2"}, {"prompt": "2+2"})}
    settings = config(URL, model, data=data, rewards=[{"function": "arithmetic"}])
    refused(GradingError, "^missing reward column: arithmetic needs 'worked'; there are: none$", settings)


@pytest.mark.parametrize("function", ["tests.reward_functions:nobody", "tests.no_such_module:f"])
def test_a_reward_function_that_cannot_be_loaded(model, store, function):
    refused(GradingError, function.replace(".", r"\."), config(URL, model, rewards=[{"function": function}]))


def test_an_advantage_estimator_that_cannot_be_used(model, store):
    settings = config(URL, model, algorithm={"advantage_estimator": "tests.own_estimators:of_something_else"})
    refused(
        ValueError, r"^algorithm\.advantage_estimator: value .*; allowed: .*, but its parameters do not fit: ", settings
    )


@pytest.mark.slow
def test_a_reward_model_that_gives_no_reward(model, store, monkeypatch):
    monkeypatch.setattr(user_process, "start", ForkedWorker)
    judge = {"function": "reward_model", "name": "judge", "model": str(model)}
    reason = r"^reward 'judge': model: value '.*' lacks the weights score\.weight, with which it would give a reward; "
    refused(GradingError, reason, config(URL, model, rewards=[judge | {"label": 0}]))
    with pytest.raises(ConfigError, match=r"rewards\.0\.model: missing; the function 'reward_model' cannot do without"):
        config(URL, model, rewards=[{"function": "reward_model"}])


def test_a_model_path_that_does_not_exist(store, tmp_path):
    settings = config(URL, tmp_path / "nowhere")
    refused(
        ModelError, r"^policy\.path: '.*nowhere' does not exist; allowed: a Hugging Face model directory$", settings
    )


def test_a_model_of_pickles_only(model, store, tmp_path):
    directory = shutil.copytree(model, tmp_path / "model")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    settings = config(URL, directory)
    refused(ModelError, r"holds no \.safetensors file; pytorch_model\.bin is a pickle, which is never read", settings)


def without(model, directory, field):
    """A copy of a model directory without a field in both its configurations."""
    shutil.copytree(model, directory)
    for name in ("config.json", "generation_config.json"):
        document = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({key: document[key] for key in document if key != field}))
    return directory


def test_a_model_that_does_not_say_its_context(model, store, tmp_path):
    settings = config(URL, without(model, tmp_path / "model", "max_position_embeddings"))
    refused(EngineError, r"no max_position_embeddings; set rollout\.context_length$", settings)


def test_a_model_whose_responses_would_not_end(model, store, tmp_path):
    settings = config(URL, without(model, tmp_path / "model", "eos_token_id"))
    refused(ModelError, "no eos_token_id", settings)


def test_a_truncated_weight_file_of_the_model(model, store, tmp_path):
    directory = shutil.copytree(model, tmp_path / "model")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    refused(ModelError, r"model\.safetensors is not a whole safetensors file", config(URL, directory))


@pytest.mark.parametrize(
    "damage",
    ["absent", "cut"],
)
def test_a_tokenizer_that_cannot_be_read(model, store, tmp_path, damage):
    directory = shutil.copytree(model, tmp_path / "model")
    if damage == "cut":
        (directory / "tokenizer.json").write_text("{")
    else:
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer_config.json").unlink()
    refused(ModelError, r"policy\.path: .*tokenizer", config(URL, directory))


def test_a_context_longer_than_the_models(model, store):
    refused(EngineError, "context_length", config(URL, model, rollout={"engine": "torch", "context_length": 4096}))


@pytest.mark.parametrize("pool", ["rollout", "train"])
def test_a_machine_without_a_price(model, store, pool):
    settings = config(URL, model, pools={pool: {"machine": "potato"}})
    refused(UnknownMachine, rf"^pools\.{pool}\.machine: no price for 'potato'; known: .*GLEANER_PRICES", settings)


@pytest.mark.parametrize(
    "pool",
    [
        {"image": "no image"},
        {"tolerations": [{"kee": "x"}]},
    ],
)
def test_a_pool_that_no_node_can_be_built_for(model, pool):
    with pytest.raises(ConfigError, match=r"pools\.rollout") as caught:
        config(URL, model, pools={"rollout": pool})
    assert len(caught.value.problems) == 1


def test_a_run_directory_of_another_configuration(model, store):
    plan_iteration(config(URL, model))
    before = everything(store)
    other = config(URL, model, run={"seed": 4}, sampling={"temperature": 0.5})
    with pytest.raises(ConflictingRecord) as caught:
        prepare(other, "test", ManualClock())
    assert str(caught.value).splitlines() == [
        "memory://bad-input holds a run of another configuration; nothing was changed:",
        "  run.seed: 4 here, 3 there",
        "  sampling.temperature: 0.5 here, 1.0 there",
    ]
    assert everything(store) == before


def test_the_same_configuration_continues(model, store):
    first = plan_iteration(config(URL, model))
    assert plan_iteration(config(URL, model, trainer={"group_timeout_s": 9.0})) == first


def test_a_run_directory_that_is_something_else(model, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"name": "of another program"}')
    url = str(tmp_path / "other")
    refused(CorruptObject, "^object 'run.json' is corrupt: ", config(url, model), url)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreDenied, match="a file and a folder want the same name"):
        prepare(config(str(tmp_path / "file"), model), "test", ManualClock())
    assert (tmp_path / "file").read_text() == "x"


class Unconditional(MemoryStore):
    """Like servers that do not know the condition: every create succeeds and overwrites."""

    def create(self, key, body):
        self.put(key, body)
        return True


def test_a_store_without_atomic_create(model):
    memory_store("bad-input", Unconditional("bad-input"))
    reason = "^memory://bad-input cannot hold a run: .*the condition of an atomic create is ignored$"
    refused(StoreUnfit, reason, config(URL, model))


def damaged(store, part, *, truncated):
    """Truncate the first object whose key contains `part`, or change a byte in it; its key."""
    key = next(key for key in store.list("") if part in key)
    body = store.get(key)
    middle = len(body) // 2
    store.put(key, body[:middle] if truncated else body[:middle] + bytes([body[middle] ^ 0xFF]) + body[middle + 1 :])
    return key


@pytest.fixture(scope="module")
def rolled_out(model):
    store = memory_store("bad-input")
    plan_iteration(config(URL, model, trainer={"group_timeout_s": 0.1}))
    roll_out(URL, 0)
    return everything(store)


@pytest.fixture
def full_store(rolled_out):
    """A run after its first rollout."""
    store = memory_store("bad-input")
    for key, body in rolled_out.items():
        store.put(key, body)
    return store


PARTS = ["journal/00000", "journal/00001", "claims/00001", "weights/00000000/manifest", ".safetensors", "plan.json"]


@pytest.mark.slow
@pytest.mark.parametrize("truncated", [True, False], ids=["truncated", "corrupted"])
@pytest.mark.parametrize("part", [*PARTS, "prompts-"])
def test_train_refuses_what_is_damaged_by_its_name(full_store, part, truncated):
    key = damaged(full_store, part, truncated=truncated)
    before = everything(full_store)
    with pytest.raises(CorruptObject) as caught:
        train_small(URL, 0)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)
    assert everything(full_store) == before


@pytest.mark.parametrize("truncated", [True, False], ids=["truncated", "corrupted"])
@pytest.mark.parametrize("part", ["journal/00000", "claims/00001", "plan.json", "prompts-"])
def test_rollout_refuses_what_is_damaged_by_its_name(full_store, part, truncated):
    key = damaged(full_store, part, truncated=truncated)
    before = everything(full_store)
    with pytest.raises(CorruptObject) as caught:
        roll_out(URL, 0)
    assert caught.value.key == key
    after = everything(full_store)
    assert {k for k in after if after[k] != before.get(k) and "/alive/" not in k} == set()


@pytest.mark.parametrize("part", ["run.json", "lease/000001"])
def test_plan_refuses_what_is_damaged_by_its_name(full_store, model, part):
    key = damaged(full_store, part, truncated=True)
    refused(CorruptObject, key, config(URL, model))


@pytest.mark.slow
def test_a_damaged_batch_is_not_replayed(full_store):
    train_small(URL, 0)
    for key in full_store.list(layout.weights(1)) + full_store.list(layout.checkpoint(1)):
        full_store.delete(key)
    key = damaged(full_store, "batches/000000", truncated=True)
    with pytest.raises(CorruptObject) as caught:
        train_small(URL, 0)
    assert caught.value.key == key
    assert full_store.list(layout.weights(1)) == []


@pytest.mark.slow
def test_missing_s3_credentials_are_one_line_and_no_traceback(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FLYTE_AWS_"))}
    absent = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "gleaner", "status", "s3://some-bucket/run"],
        env=kept | absent,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("gleaner: cannot get s3://some-bucket/run/")
    assert "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in line
