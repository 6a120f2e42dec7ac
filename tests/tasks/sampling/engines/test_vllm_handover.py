"""Tensors that one process holds open and another maps: from packs of a weight cache, and else from shared memory."""

import mmap
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from storage.clock import ManualClock
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.weights.manifest import TensorBlock
from storage.weights.tensor_sets import publish
from storage.weights.versions import pull_version
from tasks.sampling.engines.vllm_handover import SHARED_MEMORY, held_open, mapped_tensors
from tasks.sampling.engines.weight_tensors import as_block
from tests.processes import ROOT
from tests.weight_chains import cache_at, chain, first

RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
OWNER = """
import os, sys, time
from storage.weights.manifest import TensorBlock
from tasks.sampling.engines.vllm_handover import held_open
with held_open({"w": TensorBlock("U8", (1 << 20,), bytes(range(256)) * 4096)}) as places:
    print(places[0][1], flush=True)
    time.sleep(600)
"""


def seen(owner, places):
    """What a process sees of tensors that it maps."""
    return {name: (each.shape, bytes(as_block(each).data)) for name, each in mapped_tensors(owner, places)}


def wanted(tensors):
    return {name: (block.shape, bytes(block.data)) for name, block in tensors.items()}


@pytest.fixture(scope="module")
def worker():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


def written():
    """The bytes that this process has given to write calls, sockets apart."""
    return int(re.search(r"wchar: (\d+)", Path("/proc/self/io").read_text())[1])


@pytest.mark.slow
def test_another_process_maps_tensors_that_lie_in_no_file(worker):
    tensors = first() | {"twice": first()["embed"]}
    with held_open(tensors) as places:
        assert worker.submit(seen, os.getpid(), places).result() == wanted(tensors)


@pytest.mark.slow
@pytest.mark.parametrize("is_warm", [False, True], ids=["just fetched", "held before"])
def test_a_cached_version_is_handed_over_without_a_byte_written_and_outlives_its_eviction(worker, tmp_path, is_warm):
    store, cache = MemoryStore(), cache_at(tmp_path / "cache")
    tensors = chain(store, 1)[1]
    for _ in range(1 + is_warm):
        _, pulled = pull_version(store, 1, cache, ManualClock())
    before = written()
    with held_open(pulled) as places:
        assert written() == before
        for pack in (tmp_path / "cache").glob("*.pack"):
            pack.unlink()
        assert worker.submit(seen, os.getpid(), places).result() == wanted(tensors)


def test_without_a_cache_each_tensor_is_written_once_however_many_names_it_has(tmp_path):
    store = MemoryStore()
    publish(store, layout.weights(0), first(), {})
    _, pulled = pull_version(store, 0, None, ManualClock())
    num_bytes = sum(block.num_bytes for block in pulled.values())
    before = written()
    with held_open(pulled | {"tied": pulled["embed"]}) as places:
        assert num_bytes <= written() - before <= num_bytes + len(pulled) * 64
        assert seen(os.getpid(), places)["tied"] == wanted(pulled)["embed"]


def test_a_worker_that_writes_to_a_mapped_tensor_changes_nothing_for_others():
    with held_open(first()) as places:
        for _, tensor in mapped_tensors(os.getpid(), places):
            tensor.zero_()
        assert seen(os.getpid(), places) == wanted(first())


def test_shared_memory_without_room_is_one_line_that_says_how_much_is_needed():
    status = os.statvfs(SHARED_MEMORY)
    num_bytes = 2 * status.f_blocks * status.f_frsize
    # Memory that is reserved and never touched.
    block = TensorBlock("U8", (num_bytes,), memoryview(mmap.mmap(-1, num_bytes, flags=RESERVED)))
    with pytest.raises(OSError, match=rf"/dev/shm has \d+ bytes free; needed: {num_bytes}, ") as refused:
        held_open({"w": block}).__enter__()
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_killed_owner_leaves_nothing_in_shared_memory():
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        descriptor = int(owner.stdout.readline())
        held = Path(f"/proc/{owner.pid}/fd/{descriptor}")
        assert held.stat().st_size == 1 << 20
        assert held.stat().st_nlink == 0  # no name: its bytes go with the last process that has it open
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert not held.exists()
