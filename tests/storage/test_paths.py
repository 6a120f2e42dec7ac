"""Nothing of another user is opened, followed or waited for."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from storage.paths import folder_for_sockets, is_own_folder, own_file, own_folder
from tests.foreign_files import NO_FILE, NO_FOLDER, in_time, is_there_still


def contents(path, flags=os.O_RDONLY):
    with own_file(path, flags) as descriptor:
        return os.read(descriptor, 100)


def test_a_file_of_ones_own_is_opened_and_a_missing_one_is_missing_or_made(tmp_path):
    (tmp_path / "file").write_bytes(b"ours")
    (tmp_path / "file").chmod(0o644)
    assert contents(tmp_path / "file") == b"ours"
    with pytest.raises(FileNotFoundError):
        contents(tmp_path / "missing")
    assert contents(tmp_path / "new", os.O_RDWR | os.O_CREAT) == b""
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize("what", NO_FILE)
def test_what_is_no_file_of_ones_own_is_not_opened(tmp_path, what, flags):
    NO_FILE[what](tmp_path / "x")
    with pytest.raises(OSError, match="it is not a file that this user alone may write to"):
        in_time(lambda: contents(tmp_path / "x", flags))
    assert is_there_still(tmp_path / "x")


@pytest.mark.parametrize("what", [*NO_FOLDER, "nothing"])
def test_only_a_folder_of_ones_own_is_one(tmp_path, what):
    NO_FOLDER.get(what, lambda _: None)(tmp_path / "x")
    assert not is_own_folder(tmp_path / "x")
    if what != "nothing":
        with pytest.raises(OSError, match=r"not a directory that this user alone|File exists"):
            own_folder(tmp_path / "x")
    own_folder(tmp_path / "y")
    assert is_own_folder(own_folder(tmp_path / "y"))
    assert (tmp_path / "y").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("length", [0, 50, 64, 66, 90, 300])
def test_sockets_can_be_bound_however_long_the_temporary_directory_is(tmp_path, monkeypatch, length):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        place = Path(short)
        while len(str(place)) < length:
            place /= ("x" * 40)[: max(1, length - len(str(place)) - 1)]
        place.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        with folder_for_sockets("gleaner-ranks-") as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/{'u' * 36}")
            assert is_own_folder(Path(folder))
            assert Path(folder).stat().st_mode & 0o777 == 0o700
            assert (Path(folder).parent == place) == (length <= 48)
