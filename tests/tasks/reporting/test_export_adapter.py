"""Adapters as PEFT folders: on the pretrained model they make what was published, whole or not at all."""

import json
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from storage.clock import ManualClock
from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from storage.weights.tensor_sets import publish, pull
from tasks.configuration.lora import LoraConfig
from tasks.reporting.export_adapter import export_adapter, fan_in_fan_out, target_modules
from tasks.reporting.export_model import export_model
from tests.committed_runs import run_of
from tests.small_run import (
    commit_iteration,
    config,
    everything,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)
from tests.tiny_model import VOCAB_SIZE, save_tiny_model, tiny_config, tiny_model

NOW_S = 1_750_000_000.0  # 2025-06-15
IDS = torch.tensor([[1, 5, 9, 20, 7]])
GPT2 = GPT2Config(
    vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
)
TWO_LAYERS = tiny_config(hidden_size=32, intermediate_size=48)
# Of the model, rank, alpha, the layers that are chosen, and how many these are.
RUNS = {
    "qwen2": (None, 3, 7.5, (), 14),
    "some": (None, 2, 4.0, ("q_proj", "layers.1.mlp.up_proj"), 3),
    "gpt2": (GPT2, 3, 6.0, (), 8),
    "square": (GPT2, 2, 4.0, ("attn.c_proj",), 2),
}


def run(folder, name, iterations):
    """The store of a run with so many committed iterations, and the pretrained model's directory."""
    of, rank, alpha, modules, _ = RUNS[name]
    base = save_tiny_model(folder, tiny_model(of or TWO_LAYERS))
    url = f"memory://adapter-{name}"
    store = memory_store(f"adapter-{name}")
    lora = {"rank": rank, "alpha": alpha, "target_modules": list(modules)}
    for iteration in range(iterations):
        # A GPT-2 calls its longest input otherwise.
        plan_iteration(config(url, base, lora=lora, rollout={"context_length": 200}))
        roll_out(url, iteration)
        train_small(url, iteration)
        commit_iteration(url, iteration)
    return store, base


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """A run with checkpoints of versions 1 and 2, and its pretrained model."""
    return run(tmp_path_factory.mktemp("base"), "qwen2", 2)


@pytest.fixture
def store(committed):
    """A copy of that run, to be changed."""
    return copied(committed[0], MemoryStore("copy"))


def copied(store, into):
    for key, body in everything(store).items():
        into.put(key, body)
    return into


def export(store, folder, **choices):
    return export_adapter(store, folder, ManualClock(NOW_S), **choices)


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def check_adapter(store, base, out, name, version=None):
    _, rank, alpha, _, layers = RUNS[name]
    done = export(store, out / "adapter", version=version)
    merged = export_model(store, out / "merged", ManualClock(NOW_S), version=version)
    assert (done.version, done.rank, done.layers) == (merged.version, rank, layers)
    pretrained = AutoModelForCausalLM.from_pretrained(base)
    before = logits(pretrained)
    adapted = PeftModel.from_pretrained(pretrained, str(done.path))
    expected = logits(AutoModelForCausalLM.from_pretrained(merged.path))
    torch.testing.assert_close(logits(adapted), expected, rtol=0, atol=1e-5)
    assert (before - expected).abs().max() > 1e-3
    held = load_file(done.path / "adapter_model.safetensors")
    loaded = {key.replace(".default", ""): tensor for key, tensor in adapted.state_dict().items() if ".lora_" in key}
    assert held.keys() == loaded.keys()
    assert all(torch.equal(held[key], tensor) for key, tensor in loaded.items())
    assert done.num_bytes == sum(tensor.nbytes for tensor in held.values())
    stated = json.loads((done.path / "adapter_config.json").read_text())
    assert (stated["r"], stated["lora_alpha"], stated["base_model_name_or_path"]) == (rank, alpha, str(base))
    return stated


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_on_the_pretrained_model_it_makes_the_published_one(committed, tmp_path, version):
    stated = check_adapter(*committed, tmp_path, "qwen2", version)
    names = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    assert (" ".join(stated["target_modules"]), stated["fan_in_fan_out"]) == (names, False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "transposed"), [("some", False), ("gpt2", True), ("square", True)])
def test_other_layers_and_models(tmp_path, name, transposed):
    store, base = run(tmp_path / "base", name, 1)
    stated = check_adapter(store, base, tmp_path, name)
    assert stated["fan_in_fan_out"] is transposed
    assert stated["target_modules"] == (list(RUNS[name][3]) or ["c_attn", "c_fc", "c_proj"])


def test_the_newest_is_the_default_and_the_card_says_which(committed, tmp_path):
    store, base = committed
    done = export(store, tmp_path / "new" / "out")
    assert done.version == 2
    assert sorted(path.name for path in done.path.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    card = (done.path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\npipeline_tag: text-generation\n---\n")
    assert f"# {base.name}, adapter of weight version 2\n" in card
    size = f"LoRA of rank 3, alpha 7.5, for 14 layers, {done.num_bytes} bytes of float32"
    for row in (f"run | `{store.url}`", f"base model | `{base.name}`", f"adapter | {size}", "exported | 2025-06-15"):
        assert f"| {row} |\n" in card


def test_only_checkpoints_that_are_there(store, tmp_path):
    with pytest.raises(LookupError, match=r"version: weight version 0 is the pretrained model, .*; allowed: 1 or more"):
        export(store, tmp_path / "out", version=0)
    with pytest.raises(LookupError, match=r"version: checkpoint 7 is not published; allowed: 1, 2$"):
        export(store, tmp_path / "out", version=7)
    sweep(store, RetentionConfig(keep_checkpoints=1))
    with pytest.raises(
        LookupError, match=r"checkpoint 1 was deleted by .* \(trainer.checkpoint_interval\); allowed: 2$"
    ):
        export(store, tmp_path / "out", version=1)
    for key in store.list(layout.CHECKPOINTS):
        store.delete(key)
    with pytest.raises(LookupError, match="memory://copy holds no checkpoint yet"):
        export(store, tmp_path / "out")
    with pytest.raises(LookupError, match="memory://none holds no run"):
        export(MemoryStore("none"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


class Swept(MemoryStore):
    """Retention comes between looking which checkpoints there are and reading one."""

    def get(self, key, start=0, end=None):
        if key == layout.manifest(layout.checkpoint(1)):
            sweep(self, RetentionConfig(keep_checkpoints=1))
        return super().get(key, start, end)


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_named(committed, tmp_path):
    with pytest.raises(LookupError, match=r"checkpoint 1 was deleted by .*; allowed: 2"):
        export(copied(committed[0], Swept("swept")), tmp_path / "out", version=1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_adapters_is_refused(tmp_path):
    url, store = "memory://whole", memory_store("whole")
    plan_iteration(config(url, model_directory(tmp_path / "base")))
    with pytest.raises(
        ValueError, match=r"lora: value null in .* memory://whole, .*; allowed: a section lora; --model"
    ):
        export(store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_an_adapter_of_this_model_is_refused(store, tmp_path):
    _, blocks = pull(store, layout.checkpoint(2))
    some = "parameter.model.layers.0.mlp.up_proj.lora_A.default.weight"
    other = {name: block for name, block in blocks.items() if name != some}
    damages = [
        (other, r"factors of shapes None and \(48, 3\) for 'model\.layers\.0\.mlp\.up_proj', whose weight is \(48, 32"),
        (other | {some.replace("up_proj", "nothing"): blocks[some]}, r"for 'model\.layers\.0\.mlp\.nothing', .* None"),
        (blocks | {"parameter.model.norm.weight": blocks[some]}, r"tensor 'parameter\.model\.norm\.weight' of shape"),
        (blocks | {some: blocks[some.replace("_A", "_B")]}, r"allowed: the two factors of layers, of rank 3"),
        ({"exp_avg.x": blocks[some]}, "it holds no factors of an adapter"),
    ]
    for version, (tensors, message) in enumerate(damages, start=3):
        publish(store, layout.checkpoint(version), tensors, {})
        with pytest.raises(
            CorruptObject, match=f"'checkpoints/0000000{version}/manifest.json' is corrupt: .*{message}"
        ):
            export(store, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_only_an_empty_folder_is_taken(committed, tmp_path):
    (tmp_path / "mine").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="is not empty; allowed: an empty folder, or one that is made"):
        export(committed[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


BASE = {"a.weight": (8, 4), "a.bias": (8,), "s.weight": (4, 4), "n.weight": (4,), "n.bias": (4,)}
TURNED = BASE | {"a.weight": (4, 8)}
LINEAR, SQUARE = {"a": (8, 4)}, {"s": (4, 4)}


@pytest.mark.parametrize(
    ("base", "layers", "expected"),
    [
        (BASE, LINEAR, False),
        (TURNED, LINEAR, True),
        (BASE, SQUARE, False),
        (TURNED, SQUARE, False),  # without a bias
        (BASE | {"s.bias": (4,)}, SQUARE, False),  # as the other layer
        (TURNED | {"s.bias": (4,)}, SQUARE, True),
        (TURNED | {"s.bias": (4,)}, SQUARE | LINEAR, True),
    ],
)
def test_how_weights_are_held_is_told_by_shapes_and_biases(base, layers, expected):
    assert fan_in_fan_out(base, layers) is expected


def test_what_does_not_tell_how_weights_are_held_is_refused():
    alone = {"s.weight": (4, 4), "s.bias": (4,)}
    both = BASE | {"b.weight": (4, 8), "b.bias": (8,), "s.bias": (4,)}
    for base in (alone, both):
        with pytest.raises(
            ValueError, match=r"fan_in_fan_out: layers such as 's' are square, .*; allowed: models where"
        ):
            fan_in_fan_out(base, SQUARE)
    with pytest.raises(ValueError, match=r"some adapted layers .* others .*; allowed: one of both"):
        fan_in_fan_out(both, LINEAR | {"b": (8, 4)})


def test_layers_are_named_by_their_ends_where_these_choose_no_other():
    every = LoraConfig()
    base = ["x.0.q.weight", "x.0.q.bias", "x.1.q.weight", "head.weight"]
    assert target_modules(every, ["x.0.q", "x.1.q"], base) == ["q"]
    assert target_modules(every, ["x.1.q"], base) == ["x.1.q"]
    assert target_modules(LoraConfig(target_modules=("1.q",)), ["x.1.q"], base) == ["1.q"]


WITHOUT_TORCH = """
import sys
from pathlib import Path
from storage.clock import ManualClock
from storage.stores.connect import connect
from tasks.reporting.export_adapter import export_adapter

export_adapter(connect(sys.argv[1]), Path(sys.argv[2]), ManualClock())
print([name for name in ("torch", "peft", "transformers") if name in sys.modules])
"""


@pytest.mark.slow
def test_neither_torch_nor_peft_is_needed(committed, tmp_path):
    copied(committed[0], connect(str(tmp_path / "run")))
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "run"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_run_that_cannot_be_read_is_no_run_without_adapters(tmp_path):
    damaged = MemoryStore("damaged")
    run_of(damaged, 1)
    damaged.put(layout.RUN, b"{}")
    with pytest.raises(CorruptObject, match=r"object 'run\.json' is corrupt"):
        export(damaged, tmp_path / "out")
