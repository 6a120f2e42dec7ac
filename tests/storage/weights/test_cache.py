import multiprocessing
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage.clock import ManualClock, SystemClock
from storage.digests import digest_of
from storage.records import layout
from storage.stores.local import LocalStore
from storage.weights.cache import WeightCache, open_cache
from storage.weights.manifest import TensorBlock, TensorEntry
from storage.weights.tensor_sets import publish
from storage.weights.versions import pull_version
from tests.foreign_files import NO_FILE, NO_FOLDER, in_time, is_there_still

RUN = "memory://run"


def tensor(seed: int, size: int = 1000) -> tuple[TensorEntry, TensorBlock]:
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()
    return entry_of(data), TensorBlock("U8", (size,), data)


def entry_of(data: bytes) -> TensorEntry:
    return TensorEntry(dtype="U8", shape=(len(data),), object="0" * 32, digest=digest_of(data))


def store(cache: WeightCache, version: int, *seeds: int, size: int = 1000) -> None:
    cache.store(RUN, version, {str(seed): tensor(seed, size) for seed in seeds})


def held(cache: WeightCache, *seeds: int, size: int = 1000) -> list[int]:
    cache.refresh()
    found = cache.find({str(seed): tensor(seed, size)[0] for seed in seeds})
    for seed, block in found.items():
        assert bytes(block.data) == tensor(int(seed), size)[1].data
    return sorted(map(int, found))


def packs(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.pack"), key=lambda path: path.stat().st_mtime_ns)


def test_what_was_stored_is_found_by_another_process_life(tmp_path):
    store(WeightCache(tmp_path, 1 << 20), 3, 1, 2)
    again = WeightCache(tmp_path, 1 << 20)
    assert held(again, 1, 2, 7) == [1, 2]
    assert [again.newest_held(RUN, version) for version in (2, 3, 9)] == [None, 3, 3]
    assert again.newest_held("memory://other", 9) is None
    assert (packs(tmp_path)[0].stat().st_mode & 0o777) == 0o600


def test_empty_tensors_need_no_file(tmp_path):
    cache = WeightCache(tmp_path, 1 << 20)
    store(cache, 1, 5, size=0)
    assert held(cache, 5, size=0) == [5]
    assert packs(tmp_path) == []


def test_found_memory_can_be_written_and_the_file_stays_as_it_is(tmp_path):
    cache = WeightCache(tmp_path, 1 << 20)
    store(cache, 1, 1)
    cache.refresh()
    block = cache.find({"1": tensor(1)[0]})["1"]
    assert isinstance(block.data, memoryview)
    block.data[:4] = b"\0\0\0\0"
    assert held(WeightCache(tmp_path, 1 << 20), 1) == [1]


def test_damaged_packs_are_not_used_and_go(tmp_path, caplog):
    for damage in (
        lambda body: body[:-1] + bytes([body[-1] ^ 1]),
        lambda body: body[:-10],
        lambda _: b"",
        lambda _: b"x" * 99,
    ):
        cache = WeightCache(tmp_path, 1 << 20)
        store(cache, 1, 1)
        [path] = packs(tmp_path)
        path.write_bytes(damage(path.read_bytes()))
        assert held(WeightCache(tmp_path, 1 << 20), 1) == []
        path.unlink(missing_ok=True)
    assert "does not match its digests" in caplog.text
    assert "cannot be read" in caplog.text


def test_the_least_recently_used_go_first_and_the_bound_is_kept(tmp_path):
    cache = WeightCache(tmp_path, 3000)
    for version in range(3):
        store(cache, version, version, size=800)
        newest = next(path for path in packs(tmp_path) if path.stat().st_mtime > 1000)
        os.utime(newest, (version, version))
    assert held(WeightCache(tmp_path, 3000), 0, size=800) == [0]
    store(cache, 3, 3, size=1400)
    assert held(cache, 0, 1, 2, size=800) == [0]
    assert held(cache, 3, size=1400) == [3]
    assert sum(path.stat().st_size for path in packs(tmp_path)) <= 3000


def test_what_is_larger_than_the_bound_is_not_kept(tmp_path, caplog):
    cache = WeightCache(tmp_path, 3000)
    store(cache, 1, 1)
    store(cache, 2, 2, size=5000)
    assert held(cache, 1) == [1]
    assert "bytes do not fit; allowed: 3000" in caplog.text


def disk_of(directory: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `directory` lie on a disk of its own."""

    def statvfs(_: Path) -> SimpleNamespace:
        used = sum(path.stat().st_size for path in directory.iterdir())
        return SimpleNamespace(f_bavail=num_bytes - used, f_frsize=1)

    monkeypatch.setattr("os.statvfs", statvfs)


def test_on_a_small_disk_the_newest_versions_replace_the_oldest(tmp_path, monkeypatch):
    disk_of(tmp_path, 10_000, monkeypatch)
    cache = WeightCache(tmp_path, 1 << 20)
    for version in range(6):
        store(cache, version, version, size=2200)
        assert held(cache, version, size=2200) == [version]
        assert sum(path.stat().st_size for path in packs(tmp_path)) <= 5000
    assert held(cache, 4, 5, size=2200) == [4, 5]


def test_packs_that_fill_a_disk_are_no_room_for_more_than_half_of_it(tmp_path, monkeypatch, caplog):
    disk_of(tmp_path, 10_000, monkeypatch)
    cache = WeightCache(tmp_path, 1 << 20)
    store(cache, 0, 0, size=4000)
    assert [cache.has_room(num_bytes) for num_bytes in (5000, 5001)] == [True, False]
    store(cache, 1, 1, size=5500)
    assert held(cache, 0, size=4000) == [0]
    assert "bytes do not fit; allowed: 5000" in caplog.text


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path, caplog):
    cache = WeightCache(tmp_path / "absent", 1 << 20)
    store(cache, 1, 1)
    assert held(cache, 1) == []
    assert not cache.has_room(1)
    with cache.fetching("x", ManualClock()):
        pass
    assert "not kept" in caplog.text
    assert "without the lock" in caplog.text


def test_what_dead_writers_left_is_removed_and_what_living_ones_write_is_not(tmp_path):
    import fcntl  # noqa: PLC0415 - a writer shows by it that it lives

    dead, living = tmp_path / "a.part", tmp_path / "b.part"
    dead.write_bytes(b"x")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store(WeightCache(tmp_path, 1 << 20), 1, 1)
        assert living.exists()
    assert not dead.exists()


def test_one_fetches_and_the_others_wait(tmp_path):
    order: list[str] = []
    inside = threading.Event()

    def second() -> None:
        inside.wait()
        with WeightCache(tmp_path, 1).fetching("v", SystemClock()):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with WeightCache(tmp_path, 1).fetching("v", SystemClock()):
        inside.set()
        thread.join(0.25)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_waits_says_what_for_and_fetches_by_itself_at_the_limit(tmp_path, caplog):
    clock = ManualClock()
    with WeightCache(tmp_path, 1).fetching("v", clock), WeightCache(tmp_path, 1).fetching("v", clock, wait_s=30.0):
        assert 30 <= clock.monotonic() < 31
    waited, given_up = [record.getMessage() for record in caplog.records]
    assert waited == (
        f"waiting for another process of this machine to fetch v (it holds {tmp_path}/v.lock), since 1970-01-01 00:00:0"
        "0 UTC and until 1970-01-01 00:00:30 UTC; then this one fetches it, too"
    )
    assert given_up.endswith("is held for 30 s; fetching without it")


class Preempted(BaseException):
    pass


def test_who_waits_can_be_called_away_and_who_holds_lets_go(tmp_path):
    clock = ManualClock()

    def check() -> None:
        if clock.monotonic() > 5:
            raise Preempted

    with WeightCache(tmp_path, 1).fetching("v", clock):
        with pytest.raises(Preempted), WeightCache(tmp_path, 1).fetching("v", clock, check):
            pytest.fail("the lock is held")
        assert clock.monotonic() < 5.5
    with pytest.raises(Preempted), WeightCache(tmp_path, 1).fetching("v", clock):
        raise Preempted
    with WeightCache(tmp_path, 1).fetching("v", clock, check=lambda: pytest.fail("nobody holds the lock")):
        pass


def test_a_pack_that_was_not_finished_is_not_kept(tmp_path):
    cache = WeightCache(tmp_path, 1 << 20)

    def check() -> None:
        raise Preempted

    with pytest.raises(Preempted):
        cache.store(RUN, 1, {"1": tensor(1)}, check)
    assert list(tmp_path.iterdir()) == []


def test_nobody_waits_for_ever(tmp_path, caplog):
    clock = ManualClock()
    with WeightCache(tmp_path, 1).fetching("v", clock), WeightCache(tmp_path, 1).fetching("v", clock, wait_s=30.0):
        pass
    assert 30 <= clock.monotonic() < 31
    assert "fetching without it" in caplog.text


def test_opening(tmp_path, caplog, monkeypatch):
    assert open_cache(str(tmp_path), 0) is None
    assert open_cache(str(tmp_path / "a" / "b"), 1) is not None
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("file", "link", "open", "file/below"):
        assert open_cache(str(tmp_path / name), 1) is None
    assert caplog.text.count("weights are not cached") == 4
    assert f"{tmp_path / 'link'} is a link; allowed: what the link leads to" in caplog.text
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert open_cache(None, 1) is not None
    assert (tmp_path / f"gleaner-weights-{os.getuid()}").is_dir()


@pytest.mark.parametrize("what", NO_FOLDER)
def test_another_users_directory_of_our_name_is_not_used(tmp_path, monkeypatch, caplog, what):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = tmp_path / f"gleaner-weights-{os.geteuid()}"
    NO_FOLDER[what](place)
    assert in_time(lambda: open_cache(None, 1)) is None
    assert "weights are not cached" in caplog.text
    assert is_there_still(place)


@pytest.mark.parametrize("what", NO_FILE)
def test_what_is_no_file_of_ones_own_is_neither_read_nor_waited_for(tmp_path, caplog, what):
    for name in ("a.pack", "b.part", "c.lock"):
        NO_FILE[what](tmp_path / name)
    cache = WeightCache(tmp_path, 1 << 20)

    def use():
        assert held(cache, 1) == []
        with cache.fetching("c", ManualClock()):
            store(cache, 1, 1)
        assert held(cache, 1) == [1]

    in_time(use)
    assert "fetching without the lock" in caplog.text
    assert all(is_there_still(tmp_path / name) for name in ("b.part", "c.lock"))


class Counting(LocalStore):
    """A local store that notes in a file which objects were read."""

    def get_into(self, key: str, start: int, view: memoryview) -> int:
        with (Path(self.url).parent / "reads").open("a") as file:
            file.write(f"{key}\n")
        return super().get_into(key, start, view)


def pull_in_process(root: str, cache: str) -> None:
    pull_version(Counting(Path(root)), 0, WeightCache(Path(cache), 1 << 24), SystemClock())


@pytest.mark.parametrize("count", [4])
def test_processes_of_one_machine_fetch_once(tmp_path, count):
    run = Counting(tmp_path / "run", fsync=False)
    publish(run, layout.weights(0), {str(seed): tensor(seed)[1] for seed in range(5)}, {}, object_bytes_max=1)
    (tmp_path / "cache").mkdir()
    context = multiprocessing.get_context("fork")
    arguments = (run.url, str(tmp_path / "cache"))
    processes = [context.Process(target=pull_in_process, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * count
    assert len((tmp_path / "reads").read_text().splitlines()) == 5
    assert len(packs(tmp_path / "cache")) == 1
