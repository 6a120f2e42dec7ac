import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage.stores import race
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore
from storage.stores.race import NO_WRITER, Attempt, Race, race_processes, race_threads
from storage.stores.store import StoreDenied, StoreUnavailable
from tests.s3_server import S3_BUCKET, SerialisedMoto, make_bucket, moto_server, point_to

KEYS = ["race/0", "race/1", "race/2"]


class CheckThenAct(MemoryStore):
    """Looks, waits a moment, and writes: right for one writer after another."""

    def create(self, key: str, body: bytes) -> bool:
        if self.list(key):
            return False
        time.sleep(0.005)
        self.put(key, body)
        return True


class LosingAnswers(MemoryStore):
    """Creates, and says that there was no answer."""

    def create(self, key: str, body: bytes) -> bool:
        if super().create(key, body):
            raise StoreUnavailable("no answer")
        return False


class Halving(MemoryStore):
    """Stores half of every body."""

    def create(self, key: str, body: bytes) -> bool:
        return super().create(key, body[: len(body) // 2])


class Failing(MemoryStore):
    def create(self, key: str, body: bytes) -> bool:
        raise StoreDenied("refused")


class MotoWithAGap(SerialisedMoto):
    """Keeps the condition of a create, and forgets it for a moment between looking and writing."""

    def __call__(self, environment, start_response):
        if environment["REQUEST_METHOD"] == "PUT" and "HTTP_IF_NONE_MATCH" in environment:
            with self.lock:
                exists = environment["PATH_INFO"] in self.written
            time.sleep(0.02)
            if not exists:
                del environment["HTTP_IF_NONE_MATCH"]
                self.written.add(environment["PATH_INFO"])
        return super().__call__(environment, start_response)

    def __init__(self, application):
        super().__init__(application)
        self.written = set()


def test_threads_on_a_sound_store():
    race = race_threads(MemoryStore(), KEYS, 16)
    assert race.faults() == []
    assert race.creates() == 48
    for number in range(3):
        assert sum(of_writer[number].won for of_writer in race.attempts) == 1


def test_processes_on_a_directory(tmp_path):
    race = race_processes(str(tmp_path), KEYS, 16)
    assert race.faults() == []
    assert len(race.attempts) == 16
    assert LocalStore(tmp_path).list("") == KEYS


def test_threads_find_the_gap_between_looking_and_writing():
    faults = race_threads(CheckThenAct(), KEYS, 16).faults()
    assert faults
    assert "of 16 writers created 'race/" in faults[0]


@pytest.mark.slow
def test_processes_find_the_gap_between_looking_and_writing(s3_server, monkeypatch):
    with moto_server(MotoWithAGap) as (endpoint, _):
        point_to(endpoint, monkeypatch)
        make_bucket(endpoint)
        faults = race_processes(f"s3://{S3_BUCKET}/gap", KEYS, 4).faults()
    assert faults
    assert "of 4 writers created 'race/" in faults[0]


def test_a_lost_answer_is_still_a_win():
    assert race_threads(LosingAnswers(), KEYS, 4).faults() == []


def test_half_a_body_is_nobodys():
    faults = race_threads(Halving(), KEYS[:1], 4).faults()
    assert faults == ["4 of 4 writers did not read the winner's whole body at 'race/0'"]


@pytest.mark.parametrize(
    ("attempts", "fault"),
    [
        ([[Attempt(won=True, seen=0)], [Attempt(won=False, seen=0)]], None),
        ([[Attempt(won=True, seen=0)], [Attempt(won=True, seen=1)]], "2 of 2 writers created 'k'"),
        ([[Attempt(won=False, seen=NO_WRITER)], [Attempt(won=False, seen=NO_WRITER)]], "0 of 2 writers created 'k'"),
        ([[Attempt(won=True, seen=0)], [Attempt(won=False, seen=NO_WRITER)]], "1 of 2 writers did not read"),
    ],
)
def test_faults_are_counted(attempts, fault):
    faults = Race(["k"], attempts).faults()
    assert faults == [] if fault is None else fault in faults[0]


def test_the_stores_own_error_is_raised_and_nobody_waits():
    with pytest.raises(StoreDenied, match="refused"):
        race_threads(Failing(), KEYS, 16)


def test_when_a_writer_dies_the_race_ends(tmp_path):
    """The others wait for it at the barrier, and their pipes stay open."""
    command = [sys.executable, "-m", "storage.stores.race", str(tmp_path), "4"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=race.ROOT
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps([f"race/{number:06d}" for number in range(100_000)]))
        process.stdin.close()
        process.stdin = None
        deadline_s = time.monotonic() + 300
        while not list(tmp_path.glob("race/0*")):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        writers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(writers) == 4
        os.kill(int(writers[2]), signal.SIGKILL)
        output, errors = process.communicate(timeout=600)
    assert (process.returncode, output, errors) == (1, "", "a writer died\n")
    assert not any(Path(f"/proc/{writer}").exists() for writer in writers)


@pytest.mark.slow
def test_nobody_waits_for_ever_for_a_writer_that_is_stuck(monkeypatch):
    class StuckOnce(MemoryStore):
        entered = threading.Lock()

        def create(self, key: str, body: bytes) -> bool:
            if key == KEYS[1] and self.entered.acquire(blocking=False):
                time.sleep(0.6)
            return super().create(key, body)

    monkeypatch.setattr(race, "BARRIER_S", 0.2)
    with pytest.raises(StoreUnavailable, match=r"racing threads on memory://\S+: a writer stopped, or took too long"):
        race_threads(StuckOnce("stuck"), KEYS, 4)


def test_the_error_of_a_process_is_one_line(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match=r"racing processes on .*file: cannot create 'race/0'") as caught:
        race_processes(str(tmp_path / "file"), KEYS, 4)
    assert "\n" not in str(caught.value)


def test_only_s3_pays_for_s3():
    code = "import sys, storage.stores.race; print(any(name in sys.modules for name in ('s3fs', 'botocore', 'numpy')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "False\n"
