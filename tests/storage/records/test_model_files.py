import json

import pytest

from storage.records import layout, model_files
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing
from tests.committed_runs import begin

TOKENIZER = json.dumps({"model": {"vocab": {"a": 5, "b": 6}}}).encode()


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    (folder / "tokenizer.model").write_bytes(b"\x00\x01")
    (folder / "merges.txt").touch()
    for name in ("model.bin", "modeling.py", "model.safetensors", "model.safetensors.index.json"):
        (folder / name).write_text("x")
    return folder


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "b"
    folder.mkdir()
    return folder


@pytest.fixture
def store(source):
    """A run with these model files."""
    found = MemoryStore()
    names = model_files.upload(found, source)
    begin(found, {name: (source / name).read_bytes() for name in names})
    return found


def test_small_files_travel_and_code_and_pickles_stay(store, source, target):
    names = ["config.json", "tokenizer.json", "tokenizer.model"]
    assert list(model_files.upload(store, source)) == names
    assert model_files.upload(store, source) == model_files.describe(source)
    model_files.download(store, target)
    assert sorted(file.name for file in target.iterdir()) == names
    assert (target / "tokenizer.model").read_bytes() == b"\x00\x01"


def test_another_file_of_the_same_name_is_refused(store, source):
    (source / "config.json").write_text('{"a": 1}')
    with pytest.raises(ConflictingRecord, match=r"another 'config\.json'"):
        model_files.upload(store, source)


def test_a_file_that_the_directory_lacks_is_refused_before_anything_is_written(store, source):
    (source / "config.json").unlink()
    (source / "added.json").write_text("{}")
    with pytest.raises(ConflictingRecord, match=r"'config\.json', which .* does not have"):
        model_files.upload(store, source)
    assert layout.model_file("added.json") not in store.list("")


def refused(store, target) -> CorruptObject:
    with pytest.raises(CorruptObject) as caught:
        model_files.download(store, target)
    assert list(target.iterdir()) == []
    return caught.value


def test_two_ids_that_are_exchanged_in_a_tokenizer_are_refused(store, target):
    key = layout.model_file("tokenizer.json")
    store.put(key, TOKENIZER.replace(b"5", b"7").replace(b"6", b"5").replace(b"7", b"6"))
    assert len(store.get(key)) == len(TOKENIZER)
    error = refused(store, target)
    assert (error.key, error.reason) == (key, "its bytes do not have the digest that run.json states")


def test_two_files_that_are_exchanged_are_refused(store, target):
    one, other = layout.model_file("config.json"), layout.model_file("tokenizer.json")
    held = store.get(one), store.get(other)
    store.put(one, held[1])
    store.put(other, held[0])
    assert refused(store, target).key == one


def test_a_missing_file_is_named(store, target):
    store.delete(layout.model_file("config.json"))
    error = refused(store, target)
    assert (error.key, "it is missing" in error.reason) == ("model/config.json", True)


def test_a_file_that_run_json_does_not_list_is_not_used(store, target):
    store.put(layout.model_file("chat_template.jinja"), b"another")
    model_files.download(store, target)
    assert not (target / "chat_template.jinja").exists()


@pytest.mark.parametrize("name", ["evil.py", "folder/config.json"])
def test_a_name_that_is_no_model_file_is_never_written(name, target):
    store = MemoryStore()
    begin(store, {name: b"x"})
    assert refused(store, target).key == f"model/{name}"


def test_without_a_run_there_are_no_model_files(target):
    with pytest.raises(ObjectMissing):
        model_files.download(MemoryStore(), target)


def test_a_file_that_is_too_large_is_named(source, monkeypatch):
    monkeypatch.setattr(model_files, "FILE_BYTES_MAX", 1)
    with pytest.raises(ValueError, match=r"config\.json: 2 bytes; allowed beside the weights: 1"):
        model_files.describe(source)
