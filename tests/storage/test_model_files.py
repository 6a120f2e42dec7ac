import pytest

from storage import layout, model_files
from storage.memory import MemoryStore
from storage.store import ConflictingRecord


def test_small_files_travel_and_code_and_pickles_stay(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    (source / "config.json").write_text("{}")
    (source / "tokenizer.model").write_bytes(b"\x00\x01")
    for name in ("model.bin", "modeling.py", "model.safetensors", "model.safetensors.index.json"):
        (source / name).write_text("x")
    store = MemoryStore()
    assert model_files.upload(store, source) == ["config.json", "tokenizer.model"]
    model_files.download(store, target)
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "tokenizer.model"]
    assert (target / "tokenizer.model").read_bytes() == b"\x00\x01"


def test_another_file_of_the_same_name_is_refused(tmp_path):
    store = MemoryStore()
    (tmp_path / "config.json").write_text("{}")
    model_files.upload(store, tmp_path)
    model_files.upload(store, tmp_path)
    (tmp_path / "config.json").write_text('{"a": 1}')
    with pytest.raises(ConflictingRecord, match=r"config\.json"):
        model_files.upload(store, tmp_path)


def test_a_name_that_is_no_model_file_is_never_written(tmp_path):
    store = MemoryStore()
    store.put(layout.MODEL + "evil.py", b"x")
    with pytest.raises(ValueError, match=r"evil\.py"):
        model_files.download(store, tmp_path)
    assert not list(tmp_path.iterdir())
