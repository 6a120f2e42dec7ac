"""A process that lacks memory says so of itself, and not of the bytes that it read."""

import errno
import os
import subprocess
import sys

import pyarrow as pa
import pytest

from storage.stores.shortage import raise_shortage
from storage.stores.store import CorruptObject
from tests.processes import ROOT

# A process that makes `body`, limits itself to 16 MiB more than it has, and prints what unpacking 48 MiB raises.
PROGRAM = """
import os, pathlib, resource
import numpy as np, pyarrow as pa
from storage.records import framing
from storage.weights import deltas
numbers = np.zeros(6 << 20, np.int64)
{make}
held = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (held + (16 << 20),) * 2)
try:
    {read}
except BaseException as error:
    print([kind.__name__ for kind in type(error).__mro__])
"""
READERS = {
    "a shard": (
        # What unpacks to too much more than it is stored as, as zeros would, is stored as it is.
        "table = pa.table({'n': np.arange(len(numbers))}); body, schema = framing.encode_table(table), table.schema",
        "framing.decode_table('a', body, schema)",
    ),
    "a difference": (
        "body = deltas.encode(numbers.tobytes(), np.arange(len(numbers)).tobytes(), 8)",
        "deltas.apply(body, numbers.view(np.uint8).data, 8)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "read"), READERS.values(), ids=READERS.keys())
def test_what_does_not_fit_into_memory_is_not_called_corrupt(make, read):
    # Arrow's other pools reserve address space beforehand, which no limit takes back.
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "PYTHONPATH": str(ROOT)}
    code = PROGRAM.format(make=make, read=read)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "MemoryError" in done.stdout
    assert "CorruptObject" not in done.stdout


LACKS: list[Exception] = [
    MemoryError(),
    pa.ArrowMemoryError("malloc of size 64 failed"),
    pa.ArrowCancelled("interrupted"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OSError(errno.EMFILE, "Too many open files"),
    OSError("ZSTD decompression failed: Allocation error : not enough memory"),
    ValueError("Cannot allocate memory (os error 12)"),
]
DAMAGES: list[Exception] = [
    pa.ArrowInvalid("Expected to read 8 metadata bytes, but only read 2"),
    OSError("ZSTD decompression failed: Data corruption detected"),
    OSError(errno.EIO, "Input/output error"),
    ValueError("a gap leads beyond the end of the tensor"),
]


@pytest.mark.parametrize("error", LACKS, ids=repr)
def test_what_a_process_lacks_is_raised(error):
    with pytest.raises((MemoryError, OSError, pa.ArrowCancelled)) as caught:
        raise_shortage(error)
    assert not isinstance(caught.value, CorruptObject)


@pytest.mark.parametrize("error", DAMAGES, ids=repr)
def test_what_is_wrong_with_bytes_is_left_to_the_caller(error):
    assert raise_shortage(error) is None
