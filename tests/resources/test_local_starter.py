import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from resources.local_starter import Starter, running_starter
from resources.process import descendants
from tasks.rollout import IMPORTS
from tests.processes import ROOT, are_gone, wait_until

pytestmark = pytest.mark.slow

TELLS = """
import json, os, random, sys, uuid
import numpy, torch
told = {
    "name": __name__,
    "argv": sys.argv,
    "path": sys.path[0],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "session": os.getsid(0),
    "pid": os.getpid(),
    "parent": os.getppid(),
    "threads": torch.get_num_threads(),
    "seed": torch.initial_seed(),
    "random": [random.random(), numpy.random.rand(), str(uuid.uuid4())],
    "cuda": torch.cuda.is_initialized(),
    "vllm": "vllm" in sys.modules,
}
open(sys.argv[1], "w").write(json.dumps(told))
os.environ["LEFT_BEHIND"] = "1"
sys.exit(int(sys.argv[2]))
"""
WAITS = """
import os, pathlib, signal, sys, time
def flush(*_):
    pathlib.Path("flushed").touch()
    os._exit(137)
signal.signal(signal.SIGTERM, flush)
pathlib.Path(str(os.getpid())).touch()
time.sleep(600)
"""
ENVIRONMENT = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "3"}


@pytest.fixture(scope="module")
def starter():
    """A starter of these tests alone: other files' processes are children of the shared starter."""
    own = Starter({**os.environ, "PYTHONPATH": str(ROOT)})
    yield own
    own.close()


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


def waiting(starter, folder, monkeypatch):
    """A process that waits for SIGTERM in `folder`, and its number."""
    monkeypatch.chdir(folder)
    child = starter.start([script(folder, WAITS)], ENVIRONMENT)
    wait_until(lambda: any(file.name.isdecimal() for file in folder.iterdir()))
    return child, next(int(file.name) for file in folder.iterdir() if file.name.isdecimal())


def test_a_process_is_as_a_new_python_would_be(starter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [script(tmp_path, TELLS), "told", "7"]
    assert starter.start(command, ENVIRONMENT | {"OWN": "ä\udcff"}, IMPORTS).wait() == 7
    told = json.loads(Path("told").read_text())
    assert (told["name"], told["argv"], told["path"]) == ("__main__", command, str(tmp_path))
    assert told["folder"] == str(tmp_path)
    assert told["environment"] == ENVIRONMENT | {"OWN": "ä\udcff"}
    assert told["threads"] == 3
    assert told["parent"] == starter.pid
    assert told["session"] == told["pid"] != os.getpid()
    assert told["cuda"] is told["vllm"] is False


def test_processes_share_neither_random_numbers_nor_variables(starter, tmp_path):
    command = script(tmp_path, TELLS)
    children = [starter.start([command, str(tmp_path / f"{i}"), "0"], ENVIRONMENT | {f"ONLY_{i}": "1"}) for i in (0, 1)]
    assert [child.wait() for child in children] == [0, 0]
    assert starter.start([command, str(tmp_path / "2"), "0"], ENVIRONMENT).wait() == 0
    first, second, third = (json.loads((tmp_path / f"{number}").read_text()) for number in range(3))
    assert len({*first["random"], *second["random"], *third["random"]}) == 9
    assert first["seed"] == second["seed"]  # as in any process that has not set it
    assert first["environment"] == ENVIRONMENT | {"ONLY_0": "1"}
    assert second["environment"] == ENVIRONMENT | {"ONLY_1": "1"}
    assert third["environment"] == ENVIRONMENT


def test_the_starter_has_one_thread_and_keeps_its_connection_to_itself(starter, tmp_path):
    def sockets(process):
        return {name for file in Path(f"/proc/{process}/fd").iterdir() if "socket" in (name := str(file.readlink()))}

    child = starter.start([script(tmp_path, "import time; time.sleep(600)")], ENVIRONMENT, IMPORTS)
    wait_until(lambda: descendants(starter.pid))
    [process] = descendants(starter.pid)
    wait_until(lambda: sockets(process) != sockets(starter.pid))
    assert len(sockets(starter.pid) - sockets(process)) == 1
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert len(list(Path(f"/proc/{starter.pid}/task").iterdir())) == 1


@pytest.mark.parametrize("word", [signal.SIGKILL, signal.SIGTERM])
def test_the_signal_that_ends_a_process_is_its_code(starter, tmp_path, word):
    child = starter.start([script(tmp_path, f"import os; os.kill(os.getpid(), {int(word)})")], ENVIRONMENT)
    assert child.wait() == -word
    child.send_signal(signal.SIGKILL)  # it has ended: another process may have its number


def test_processes_that_end_together_are_each_told_of(starter, tmp_path):
    """Signals of their ends come in the middle of one another, as when the ranks of a worker are killed."""
    sleeps = script(tmp_path, "import time; time.sleep(600)")
    for _ in range(5):
        children = [starter.start([sleeps], ENVIRONMENT) for _ in range(12)]
        wait_until(lambda: len(descendants(starter.pid)) == 12)
        for pid in descendants(starter.pid):
            os.kill(pid, signal.SIGKILL)
        assert [child.wait() for child in children] == [-signal.SIGKILL] * 12
    assert starter.alive


def test_a_process_can_be_told_to_end_and_its_wait_has_a_limit(starter, tmp_path, monkeypatch):
    child, process = waiting(starter, tmp_path, monkeypatch)
    with pytest.raises(TimeoutError):
        child.wait(0.01)
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 137
    assert are_gone([process])


def test_what_cannot_be_imported_or_found_is_told_by_the_process_itself(starter, tmp_path, capfd):
    assert starter.start([str(tmp_path / "missing.py")], ENVIRONMENT, ["no_such_module"]).wait() == 1
    assert starter.start([script(tmp_path, "import no_such_module")], ENVIRONMENT, ["no_such_module"]).wait() == 1


def test_what_is_imported_ahead_is_imported_once(tmp_path):
    (tmp_path / "leaves_a_mark.py").write_text("open('mark', 'a').write('1')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with contextlib.chdir(tmp_path):
        starter = Starter({**os.environ, "PYTHONPATH": path})
        starter.import_ahead(["leaves_a_mark"])
        wait_until((tmp_path / "mark").exists)
        command = [script(tmp_path, "import leaves_a_mark")]
        assert starter.start(command, {**ENVIRONMENT, "PYTHONPATH": path}, ["leaves_a_mark"]).wait(300) == 0
    assert (tmp_path / "mark").read_text() == "1"
    starter.close()


def test_where_the_starter_is_killed_its_processes_flush_and_count_as_lost_and_another_takes_over(
    tmp_path, monkeypatch
):
    first = running_starter(os.environ | {"PYTHONPATH": str(ROOT)})
    assert running_starter({}) is first
    child, process = waiting(first, tmp_path, monkeypatch)
    os.kill(first.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    wait_until(lambda: are_gone([process]))
    assert (tmp_path / "flushed").exists()
    assert not first.alive
    assert first.start([script(tmp_path, "")], ENVIRONMENT).wait() == -signal.SIGKILL
    second = running_starter(os.environ | {"PYTHONPATH": str(ROOT)})
    assert second is not first
    assert second.start([script(tmp_path, "")], ENVIRONMENT).wait() == 0


def test_closing_a_starter_ends_what_it_has_started(tmp_path, monkeypatch):
    own = Starter(os.environ | {"PYTHONPATH": str(ROOT)})
    child, process = waiting(own, tmp_path, monkeypatch)
    own.close()
    assert not own.alive
    assert child.wait() == -signal.SIGKILL
    wait_until(lambda: are_gone([process]))
    assert own.pid not in descendants(os.getpid())
