"""Weight versions as model directories: the very tensors, in one file or several, whole or not at all."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from storage.clock import ManualClock
from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.records import layout, model_files
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from storage.weights.tensor_sets import publish
from storage.weights.versions import pull_version
from tasks.preparing.first_weights import publish_initial
from tasks.reporting.export_model import SHARD_BYTES_MAX, choose_version, divide, export_model
from tasks.sampling.engines.weight_tensors import as_block, as_torch
from tests.committed_runs import begin, run_of
from tests.small_run import config, memory_store, model_directory, plan_iteration, roll_out, train_small
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

URL = "memory://export-model"
NOW_S = 1_750_000_000.0  # 2025-06-15
IDS = torch.tensor([[1, 5, 9, 20, 7]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(base):
    """A run with weight versions 0 and 1."""
    store = memory_store("export-model")
    plan_iteration(config(URL, base))
    roll_out(URL, 0)
    train_small(URL, 0)
    return store


@pytest.fixture
def store():
    """The retained versions 0, 3 and 4 of a run whose model is three numbers."""
    found = MemoryStore("numbers")
    run_of(found, 4)
    begin(found, {"config.json": b'{"architectures": ["X"]}'})
    sweep(found, RetentionConfig(keep_weights=2))
    return found


def export(store, folder, **choices):
    return export_model(store, folder, ManualClock(NOW_S), **choices)


def published(store, version):
    return {n: as_torch(block) for n, block in pull_version(store, version, None, ManualClock())[1].items()}


def written(folder):
    """All tensors of the folder's files, none of them twice."""
    found = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    assert max(Counter(name for each in found for name in each).values()) == 1
    return {name: tensor for each in found for name, tensor in each.items()}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def initial(directory):
    """A run that has begun with a model directory."""
    found = MemoryStore("initial")
    begin(found, {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in model_files.SUFFIXES})
    publish_initial(found, directory)
    return found


def test_the_trained_model_is_what_was_published(trained, base, tmp_path):
    done = export(trained, tmp_path / "new" / "out")
    assert (done.version, done.dtype, done.files) == (1, "float32", 1)
    expected = published(trained, 1)
    assert (done.tensors, done.num_bytes) == (len(expected), sum(t.nbytes for t in expected.values()))
    model = AutoModelForCausalLM.from_pretrained(done.path)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert state.keys() - expected.keys() == {"lm_head.weight"}
    assert model.dtype == torch.float32
    policy = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.equal(logits(model), logits(policy))  # it has learned
    policy.load_state_dict(expected, strict=False)
    assert torch.equal(logits(model), logits(policy))
    read = [AutoTokenizer.from_pretrained(path)("1+2=?") for path in (base, done.path)]
    assert read[0].input_ids == read[1].input_ids == tiny_tokenizer()("1+2=?").input_ids
    assert model.generation_config.eos_token_id == 2


def test_version_0_is_the_pretrained_model(trained, base, tmp_path):
    done = export(trained, tmp_path / "out", version=0)
    before, after = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (base, done.path))
    assert torch.equal(logits(before), logits(after))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_conversion_rounds_as_torch_does_and_the_configuration_says_so(trained, tmp_path, dtype):
    done = export(trained, tmp_path / "out", dtype=dtype)
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in published(trained, 1).items()}
    assert done.dtype == dtype
    found = written(done.path)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == expected[name].dtype for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    stated = json.loads((done.path / "config.json").read_text())
    assert stated["dtype"] == stated["torch_dtype"] == dtype
    assert AutoModelForCausalLM.from_pretrained(done.path).dtype == getattr(torch, dtype)


def test_what_a_dtype_cannot_hold_is_refused(store, tmp_path):
    tensors = {"small": as_block(torch.ones(3)), "large": as_block(torch.tensor([1.0, 1e30]))}
    publish(store, layout.weights(5), tensors, {})
    with pytest.raises(ValueError, match="float16 does not hold the values of tensor 'large'; allowed: a wider one"):
        export(store, tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == []
    assert written(export(store, tmp_path / "out", dtype="bfloat16").path)["large"][1] > 9e29
    with pytest.raises(ValueError, match="dtype: value 'int8'; allowed: stored, bfloat16, float32, float16"):
        export(store, tmp_path / "other", dtype="int8")


def test_infinities_and_integers_stay_what_they_are(store, tmp_path):
    values = torch.tensor([float("inf"), float("nan"), 1.5])
    tensors = {"odd": as_block(values), "ids": as_block(torch.tensor([1, 1 << 40]))}
    publish(store, layout.weights(5), tensors, {})
    done = export(store, tmp_path / "out", dtype="float16")
    found = written(done.path)
    assert found["ids"].tolist() == [1, 1 << 40]
    torch.testing.assert_close(found["odd"], values.half(), equal_nan=True, rtol=0, atol=0)
    assert (done.dtype, done.num_bytes) == ("float16", 2 * 3 + 8 * 2)


def test_of_several_stored_dtypes_the_configuration_states_that_of_most_weights(store, tmp_path):
    tensors = {f"norm{n}": as_block(torch.ones(3)) for n in range(4)}
    publish(store, layout.weights(5), tensors | {"w": as_block(torch.ones(9, 9).bfloat16())}, {})
    nested = {"text_config": {"torch_dtype": "float32", "size": 3}, "rope_config": {"base": 1}, "dtype": "float32"}
    begin(store, {"config.json": json.dumps(nested | {"architectures": ["X"]}).encode()})
    done = export(store, tmp_path / "out")
    assert {str(t.dtype) for t in written(done.path).values()} == {"torch.float32", "torch.bfloat16"}
    names = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert (
        json.loads((done.path / "config.json").read_text())
        == {
            "architectures": ["X"],
            "rope_config": {"base": 1},
            "text_config": {"size": 3} | names,
        }
        | names
    )


def test_several_files_with_an_index(trained, tmp_path):
    limit = 20_000
    done = export(trained, tmp_path / "out", shard_bytes_max=limit)
    names = sorted(path.name for path in done.path.glob("*.safetensors"))
    assert len(names) == done.files > 2
    assert names == [f"model-{n:05d}-of-{done.files:05d}.safetensors" for n in range(1, done.files + 1)]
    for name in names:
        tensors = load_file(done.path / name)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= limit or len(tensors) == 1
    index = json.loads((done.path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": done.num_bytes}
    for tensor, name in index["weight_map"].items():
        with safe_open(done.path / name, framework="pt") as file:
            assert tensor in file.keys()  # noqa: SIM118 - it is no mapping
            assert file.metadata() == {"format": "pt"}
    whole = export(trained, tmp_path / "whole")
    models = [AutoModelForCausalLM.from_pretrained(each.path) for each in (done, whole)]
    assert torch.equal(*map(logits, models))


def test_tensors_are_divided_in_their_order():
    assert divide({"a": 3, "b": 2, "c": 9, "d": 5, "e": 1}, 5) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert divide({"a": 5, "b": 0}, 5) == [["a", "b"]]
    assert SHARD_BYTES_MAX + (100 << 20) < 4 << 30  # a header of 100 MiB fits, too


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_that_was_stored_twice_is_written_once(tmp_path, tied):
    base = save_tiny_model(tmp_path / "base", tiny_model(tiny_config(tie_word_embeddings=tied)))
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    run = initial(base)
    assert "lm_head.weight" in published(run, 0)
    done = export(run, tmp_path / "out")
    assert ("lm_head.weight" in written(done.path)) == (not tied)
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (base, done.path)]
    assert torch.equal(*map(logits, models))


def test_a_head_of_its_own_is_kept_whatever_the_configuration_says(tmp_path):
    base = save_tiny_model(tmp_path / "base", tiny_model(tiny_config(tie_word_embeddings=False)))
    stated = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(stated | {"tie_word_embeddings": True}))
    assert "lm_head.weight" in written(export(initial(base), tmp_path / "out").path)


def test_a_configuration_without_the_models_class_gets_it(tmp_path):
    base = save_tiny_model(tmp_path / "base", tiny_model(tiny_config()))
    stated = json.loads((base / "config.json").read_text())
    assert stated.pop("architectures") == ["Qwen2ForCausalLM"]
    (base / "config.json").write_text(json.dumps(stated))
    done = export(initial(base), tmp_path / "out")
    assert json.loads((done.path / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_the_card_says_where_the_weights_come_from(trained, base, tmp_path):
    card = (export(trained, tmp_path / "out").path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n")
    assert f"# {base.name}, weight version 1\n" in card
    for row in (f"run | `{URL}`", f"base model | `{base.name}`", "exported | 2025-06-15"):
        assert f"| {row} |\n" in card
    assert "| published | 20" in card
    assert "| published |" not in (export(trained, tmp_path / "first", version=0).path / "README.md").read_text()


def test_damaged_weights_leave_nothing(trained, tmp_path):
    damaged = MemoryStore("damaged")
    for key in trained.list(""):
        damaged.put(key, trained.get(key))
    key = next(key for key in damaged.list(layout.weights(0)) if key.endswith(".safetensors"))
    body = bytearray(damaged.get(key))
    body[-1] ^= 1
    damaged.put(key, bytes(body))
    with pytest.raises(CorruptObject, match=f"object '{key}' is corrupt: tensor "):
        export(damaged, tmp_path / "out", version=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("body", "error", "text"), [
    (None, LookupError, "memory://numbers holds no 'model/config.json', without which weights are no model"),
    (b"{", CorruptObject, "object 'model/config.json' is corrupt: not JSON"),
    (b"[]", CorruptObject, "object 'model/config.json' is corrupt: not a JSON object"),
])  # fmt: skip
def test_without_a_sound_configuration_there_is_no_model(store, tmp_path, body, error, text):
    begin(store, {"config.json": body} if body else {})
    with pytest.raises(error, match=text):
        export(store, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_exchanged_model_files_are_refused_by_name(store, tmp_path):
    begin(store, {"config.json": b'{"architectures": ["X"]}', "tokenizer.json": b'{"a": 1, "b": 2}'})
    store.put(layout.model_file("tokenizer.json"), b'{"a": 2, "b": 1}')
    with pytest.raises(CorruptObject, match=r"object 'model/tokenizer\.json' is corrupt: its bytes do not have"):
        export(store, tmp_path / "out")


def test_which_versions_there_are(store):
    assert choose_version(store, None) == choose_version(store, 4) == 4
    with pytest.raises(LookupError, match=r"weight version 2 was deleted by the run's retention; allowed: 0, 3, 4$"):
        choose_version(store, 2)
    with pytest.raises(LookupError, match=r"weight version 7 is not published; allowed: 0, 3, 4$"):
        choose_version(store, 7)
    publish(store, layout.weights(5), {"x": as_block(torch.ones(1))}, {})
    with pytest.raises(LookupError, match=r"allowed: 0, 3 to 5$"):
        choose_version(store, 1)
    with pytest.raises(LookupError, match="memory://none holds no run"):
        choose_version(MemoryStore("none"), None)
    begun = MemoryStore("begun")
    begin(begun)
    with pytest.raises(LookupError, match="memory://begun holds no weight version yet"):
        choose_version(begun, None)


class Swept(MemoryStore):
    """Retention comes between looking which versions there are and reading one."""

    comes = False

    def get(self, key, start=0, end=None):
        if self.comes and key.startswith(layout.MODEL):
            self.comes = False
            sweep(self, RetentionConfig(keep_weights=2))
        return super().get(key, start, end)


def test_a_version_that_is_deleted_while_it_is_read_is_named(tmp_path):
    run = Swept("swept")
    run_of(run, 4)
    begin(run, {"config.json": b'{"architectures": ["X"]}'})
    assert choose_version(run, 2) == 2
    run.comes = True
    with pytest.raises(LookupError, match="weight version 2 was deleted by the run's retention; allowed: 0, 3, 4"):
        export(run, tmp_path / "out", version=2)
    assert list(tmp_path.iterdir()) == []


def test_only_an_empty_folder_is_taken(store, tmp_path, monkeypatch):
    full, empty, link = tmp_path / "full", tmp_path / "empty", tmp_path / "link"
    full.mkdir()
    (full / "mine").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"full is not empty; allowed: an empty folder, or one that is made"):
        export(store, full)
    with pytest.raises(NotADirectoryError, match=r"mine is a file; allowed: a folder"):
        export(store, full / "mine")
    assert (full / "mine").read_bytes() == b"mine"
    empty.mkdir()
    link.symlink_to(empty)
    with monkeypatch.context() as there:
        there.chdir(empty)
        with pytest.raises(ValueError, match="a mount point or the working directory; allowed: a folder below it"):
            export(store, Path())
    export(store, link)
    assert sorted(path.name for path in empty.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "link"]


class Filling(ManualClock):
    """Somebody else writes into the folder just before it would be put in place."""

    def __init__(self, folder):
        super().__init__(NOW_S)
        self.folder = folder

    def wall(self):
        self.folder.mkdir()
        (self.folder / "theirs").write_bytes(b"theirs")
        return super().wall()


def test_what_somebody_else_wrote_meanwhile_stays(store, tmp_path):
    with pytest.raises(FileExistsError, match="out was filled by another process meanwhile"):
        export_model(store, tmp_path / "out", Filling(tmp_path / "out"))
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


KILLED = """
import os, signal, sys
from pathlib import Path
from storage.clock import ManualClock
from storage.stores.connect import connect
from tasks.reporting.export_model import export_model

class Kills(ManualClock):
    def wall(self):
        assert "torch" not in sys.modules
        os.kill(os.getpid(), signal.SIGKILL)

export_model(connect(sys.argv[1]), Path(sys.argv[2]), Kills())
"""


def test_a_kill_leaves_nothing_that_looks_whole(store, tmp_path):
    run, out = tmp_path / "run", tmp_path / "models" / "out"
    for key in store.list(""):
        (run / key).parent.mkdir(parents=True, exist_ok=True)
        (run / key).write_bytes(store.get(key))
    command = [sys.executable, "-c", KILLED, str(run), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    [left] = out.parent.iterdir()
    assert left.name.startswith(".out.")
    assert left.name.endswith(".unfinished")
    assert (left / "model.safetensors").exists()  # it was killed when all was written
    assert export(store, out).version == 4
    assert sorted(path.name for path in out.parent.iterdir()) == [left.name, "out"]


def test_an_export_is_a_base_for_another_run(trained, tmp_path):
    out = export(trained, tmp_path / "out", dtype="bfloat16").path
    assert published(initial(out), 0).keys() == published(trained, 1).keys()
    names = model_files.upload(MemoryStore("second"), out)
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names.keys()


def test_the_example_of_the_guide_runs(trained, tmp_path, monkeypatch, capsys):
    guide = Path(__file__).parents[3] / "docs" / "guide" / "export.md"
    _, example, _ = re.findall(
        r"^```python\n(.*?)^```", guide.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    export(trained, tmp_path / "models" / "first")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "example.py"
    script.write_text(example)
    runpy.run_path(str(script))
    assert capsys.readouterr().out.startswith("1+1=")
