"""A machine's memory, shared memory, disk and compiler."""

import pytest

from tasks.doctor.free_space import GIB, FreeSpace, compiler_finding, folder_room, memory_room, room_finding

MEMINFO = "MemTotal:       25165824 kB\nMemFree:         1000000 kB\nMemAvailable:   12582912 kB\n"


def written(folder, name, text):
    (folder / name).write_text(text)
    return folder / name


def test_memory_is_what_linux_says_is_available(tmp_path):
    room = memory_room(written(tmp_path, "meminfo", MEMINFO), [tmp_path / "missing"])
    assert (room.free, room.total, room.limit) == (12 * GIB, 24 * GIB, None)
    assert str(room) == "12.0 of 24.0 GiB free"


@pytest.mark.parametrize(
    ("first", "second", "limit"),
    [(str(4 * GIB), "", 4 * GIB), ("max", str(2 * GIB), 2 * GIB), ("max", "", None), (str(1 << 62), "", None)],
)
def test_a_container_s_limit_is_read_from_either_version(tmp_path, first, second, limit):
    files = [written(tmp_path, "memory.max", first), written(tmp_path, "limit_in_bytes", second)]
    room = memory_room(written(tmp_path, "meminfo", MEMINFO), files)
    assert room.limit == limit
    assert ("may take" in str(room)) == (limit is not None)


@pytest.mark.parametrize("content", ["", "MemTotal: 1 kB\n", "MemTotal: x kB\nMemAvailable: y kB\n"])
def test_what_linux_does_not_show_is_unknown_and_not_wrong(tmp_path, content):
    assert memory_room(written(tmp_path, "meminfo", content)) is None
    assert memory_room(tmp_path / "missing") is None
    assert room_finding("memory", None).lack is None


def test_less_than_a_gibibyte_is_wrong_where_it_is_required():
    little = FreeSpace(free=64 << 20, total=64 << 20)
    assert room_finding("shared memory", little).lack == "0.06 GiB free; at least 1 GiB is needed"
    assert room_finding("shared memory", little, required=False).lack is None
    assert room_finding("memory", FreeSpace(free=GIB, total=GIB)).lack is None
    assert room_finding("memory", FreeSpace(free=8 * GIB, total=9 * GIB, limit=GIB // 2)).lack is not None


def test_a_folder_has_the_room_of_its_disk_and_a_missing_one_none(tmp_path):
    assert 0 < folder_room(tmp_path).free <= folder_room(tmp_path).total
    assert folder_room(tmp_path / "missing") is None


def test_only_a_gpu_needs_a_compiler():
    assert compiler_finding(["gcc"], has_gpu=True).lack is None
    assert compiler_finding([], has_gpu=False).lack is None
    assert "Triton" in compiler_finding([], has_gpu=True).lack
