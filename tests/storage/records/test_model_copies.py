from dataclasses import replace
from pathlib import Path

import pytest

from storage.records import canonical, layout, model_copies, records
from storage.records.canonical import wrap
from storage.records.model_copies import RewardModelRecord, StoredFile
from storage.stores.memory import MemoryStore
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "reward"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 2)
    (made / "merges.txt").write_bytes(b"")
    for name in ("pytorch_model.bin", "modeling.py"):
        (made / name).write_text("x")
    (made / "deeper").mkdir()
    (made / "deeper" / "config.json").write_text("{}")
    return made


def downloaded(store: MemoryStore, name: str, target: Path) -> dict[str, bytes]:
    target.mkdir()
    model_copies.download(store, name, target)
    return {file.name: file.read_bytes() for file in target.iterdir()}


@pytest.mark.parametrize("chunk_bytes", [100, 256, 1 << 20])
def test_a_model_comes_back_as_it_was_without_code_and_pickles(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
):
    monkeypatch.setattr(model_copies, "CHUNK_BYTES", chunk_bytes)
    store = MemoryStore()
    model_copies.upload(store, "judge", folder)
    assert downloaded(store, "judge", tmp_path / "out") == {
        name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors", "merges.txt")
    }
    record = model_copies.stored(store, "judge")
    assert record is not None
    assert len(record.files["model.safetensors"].chunks) == -(-512 // chunk_bytes)
    # Both halves of the file are the same piece, stored once.
    pieces = {digest for entry in record.files.values() for digest in entry.chunks}
    assert store.list("reward_models/") == sorted(["reward_models/judge.json", *map(layout.reward_model_chunk, pieces)])


def test_uploading_again_writes_nothing_and_names_share_their_pieces(folder: Path):
    store = MemoryStore()
    model_copies.upload(store, "judge", folder)
    before = {key: store.get(key) for key in store.list("")}
    model_copies.upload(store, "judge", folder)
    assert {key: store.get(key) for key in store.list("")} == before
    model_copies.upload(store, "other", folder)
    assert set(store.list("")) - set(before) == {"reward_models/other.json"}


def test_another_model_under_the_same_name_is_refused_by_the_file_that_differs(folder: Path):
    store = MemoryStore()
    model_copies.upload(store, "judge", folder)
    (folder / "model.safetensors").write_bytes(b"other")
    held = model_copies.stored(store, "judge")
    assert held is not None
    reason = "holds another reward model as 'judge' than '.*reward'; the first file to differ is 'model.safetensors'$"
    with pytest.raises(ConflictingRecord, match=reason):
        model_copies.upload(store, "judge", folder)
    with pytest.raises(ConflictingRecord, match=reason):
        model_copies.check(store, "judge", folder, held)
    assert model_copies.stored(store, "judge") == held


@pytest.mark.parametrize("name", ["eval_results.json", "README.txt", "generation_config.json"])
def test_a_file_that_joins_a_folder_later_makes_no_other_model_of_it(folder: Path, name: str):
    store = MemoryStore()
    model_copies.upload(store, "judge", folder)
    held = model_copies.stored(store, "judge")
    assert held is not None
    (folder / name).write_text("{}")
    model_copies.check(store, "judge", folder, held)
    model_copies.upload(store, "judge", folder)
    assert model_copies.stored(store, "judge") == held


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "chat_template.jinja", "tokenizer_config.json"])
def test_a_file_that_makes_another_model_is_refused_later_as_is_one_that_went(folder: Path, name: str):
    store = MemoryStore()
    model_copies.upload(store, "judge", folder)
    held = model_copies.stored(store, "judge")
    assert held is not None
    (folder / name).write_text("{}")
    with pytest.raises(ConflictingRecord, match=f"the first file to differ is '{name}'$"):
        model_copies.check(store, "judge", folder, held)
    (folder / name).unlink()
    (folder / "merges.txt").unlink()
    with pytest.raises(ConflictingRecord, match=r"the first file to differ is 'merges\.txt'$"):
        model_copies.check(store, "judge", folder, held)


def test_a_models_digest_is_that_of_its_files_alone(folder: Path):
    first = model_copies.content_digest(model_copies.describe(folder))
    assert first == model_copies.content_digest(model_copies.describe(folder))
    (folder / "config.json").write_text("{ }")
    assert first != model_copies.content_digest(model_copies.describe(folder))


def test_a_piece_of_another_length_than_its_file_wants_is_damage(folder: Path, tmp_path: Path):
    store = MemoryStore()
    model_copies.upload(store, "judge", folder)
    held = model_copies.stored(store, "judge")
    assert held is not None
    for wrong in (511, 513, 5000):
        files = {"model.safetensors": replace(held.files["model.safetensors"], bytes=wrong)}
        records.put(store, layout.reward_model("judge"), RewardModelRecord(files=files))
        with pytest.raises(CorruptObject, match=f"it has 512 bytes, and its file 'model.safetensors' wants {wrong}"):
            downloaded(store, "judge", tmp_path / str(wrong))


class Shrinking(MemoryStore):
    """Whose first write happens while a file of the folder becomes shorter."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def create(self, key: str, body: bytes) -> bool:
        self.file.write_bytes(self.file.read_bytes()[:-1])
        return super().create(key, body)


def test_a_file_that_changes_while_it_is_read_is_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_copies, "TRANSFERS", 1)
    store = Shrinking(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: changed while it was read"):
        model_copies.upload(store, "judge", folder)
    assert model_copies.stored(store, "judge") is None


def test_what_is_missing_or_damaged_is_named(folder: Path, tmp_path: Path):
    store = MemoryStore()
    assert model_copies.stored(store, "judge") is None
    with pytest.raises(ObjectMissing):
        model_copies.download(store, "judge", tmp_path)
    model_copies.upload(store, "judge", folder)
    key = store.list("reward_models/chunks/")[0]
    store.put(key, store.get(key) + b"!")
    with pytest.raises(CorruptObject) as caught:
        downloaded(store, "judge", tmp_path / "out")
    assert caught.value.key == key
    store.put(layout.reward_model("judge"), b"{")
    with pytest.raises(CorruptObject):
        model_copies.stored(store, "judge")


@pytest.mark.parametrize("name", ["../config.json", "a/config.json", "evil.py", "model.bin"])
def test_a_record_can_name_no_file_that_would_not_travel(name: str, tmp_path: Path):
    body = canonical.encode(RewardModelRecord(files={"config.json": StoredFile(bytes=0, chunks=())}))
    store, key = MemoryStore(), layout.reward_model("judge")
    store.put(key, wrap(key, "reward model", body.replace(b"config.json", name.encode())))
    with pytest.raises(CorruptObject, match="file names that end with"):
        model_copies.download(store, "judge", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_as_many_pieces_as_its_bytes_need():
    with pytest.raises(ValueError, match="bytes: value 1; allowed: as many as 0 chunks hold"):
        StoredFile(bytes=1, chunks=())
    number = model_copies.MODEL_BYTES_MAX // model_copies.CHUNK_BYTES + 1
    huge = StoredFile(bytes=number * model_copies.CHUNK_BYTES, chunks=("0" * 32,) * number)
    with pytest.raises(ValueError, match=r"files: \d+ bytes; allowed: 2199023255552"):
        RewardModelRecord(files={"model.safetensors": huge})
    with pytest.raises(ValueError, match="chunks: allowed: names of 32 hexadecimal digits"):
        StoredFile(bytes=1, chunks=("../../run.json",))
