"""Memory that is freed and kept goes back to the operating system."""

import gc
import os
import sys
from pathlib import Path

import pytest

from resources.freed_memory import give_back

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Below the size from which the C library takes memory for one object alone, and returns it with that.
PIECE_BYTES = 64 << 10


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_freed_between_pieces_in_use_goes_back():
    pieces = [bytes(PIECE_BYTES) for _ in range(4000)]
    for piece in pieces:
        assert piece[0] == 0
    held = pieces[::50]
    full = resident_bytes()
    del pieces, piece
    give_back()
    assert full - resident_bytes() > 2500 * PIECE_BYTES
    assert len(held) == 80


def test_cycles_are_collected():
    class Node:
        pass

    first, second = Node(), Node()
    first.other, second.other = second, first
    seen = []
    first.end = type("End", (), {"__del__": lambda _: seen.append(True)})()
    gc.disable()
    try:
        del first, second
        assert not seen
        give_back()
    finally:
        gc.enable()
    assert seen == [True]
