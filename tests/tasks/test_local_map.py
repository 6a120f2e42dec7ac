import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flytekit import map_task, workflow
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable

from resources.process import descendants
from tasks.local_map import SYSTEM_RETRIES, after_standing_map, crew_map
from tests.map_tasks import element, lasts, stops, threads
from tests.processes import ROOT, are_gone, wait_until

SETTINGS = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")


def attempts(folder: Path, number: int) -> list[int]:
    return sorted(int(file.name.split("-")[1]) for file in folder.glob(f"{number}-*"))


@pytest.mark.slow
def test_elements_are_processes_with_attempts_and_outputs_keep_their_order(tmp_path):
    outputs = crew_map(functools.partial(element, folder=str(tmp_path)))(number=[5, 1, 2])
    assert outputs == [25, 1, 4]
    assert attempts(tmp_path, 5) == [0]
    assert attempts(tmp_path, 1) == [0, 1]  # killed: a loss of the machine, started again
    assert attempts(tmp_path, 2) == [0, 1]  # recoverable: one of its own retries
    pids = {file.name.split("-")[2] for file in tmp_path.iterdir()}
    assert len(pids) == 5
    assert str(os.getpid()) not in pids


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_elements_that_run_at_once_share_the_cores_unless_the_user_gives_their_number(monkeypatch, width):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert crew_map(threads)(number=list(range(width))) == [max(1, os.cpu_count() // width)] * width
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert crew_map(threads)(number=list(range(width))) == [7] * width


def test_a_map_over_nobody_has_no_outputs(tmp_path):
    assert crew_map(functools.partial(element, folder=str(tmp_path)))(number=[]) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_ordinary_exception_is_not_retried_and_is_a_warning_beside_what_others_did(tmp_path, caplog):
    assert crew_map(functools.partial(element, folder=str(tmp_path)))(number=[3, 5]) == [None, 25]
    assert attempts(tmp_path, 3) == [0]
    [told] = [record.getMessage() for record in caplog.records if "not allowed" in record.getMessage()]
    assert re.fullmatch(r"element 0 of \S+ failed: ValueError: three is not allowed", told)


@pytest.mark.slow
def test_losses_of_the_machine_are_retried_as_often_as_flyte_does(tmp_path, caplog):
    assert crew_map(functools.partial(element, folder=str(tmp_path)))(number=[4]) == [None]
    assert "no attempts left; last: exit code -9" in caplog.text
    assert attempts(tmp_path, 4) == list(range(SYSTEM_RETRIES + 1))


@pytest.mark.slow
def test_one_that_a_signal_has_stopped_is_named_after_ten_seconds_and_at_the_limit_started_again(tmp_path, caplog):
    mapped = crew_map(functools.partial(stops, folder=str(tmp_path)))
    mapped.stopped_limit_s = 12.0
    assert mapped(number=[1]) == [1]
    [process] = [file.name.rpartition("-")[2] for file in tmp_path.glob("1-0-*")]
    [told] = [record.getMessage() for record in caplog.records if record.name == "storage.waiting"]
    assert re.fullmatch(
        rf"waiting for element 0 of \S+ \(process {process}\), which a signal has stopped \(state T\), since .* UTC "
        rf"and until .* UTC; then it is killed, and started again if attempts are left; `kill -CONT {process}` lets "
        "what is stopped go on",
        told,
    )
    assert f"(process {process}) was stopped by a signal for 12 s, and is killed" in caplog.text
    assert "attempt 0 ended with exit code -9; starting it again" in caplog.text


@pytest.mark.slow
def test_where_the_starter_itself_is_stopped_its_elements_count_as_lost_at_the_limit(tmp_path):
    mapped = crew_map(functools.partial(stops, folder=str(tmp_path)))
    mapped.stopped_limit_s = 1.0
    assert mapped(number=[2]) == [2]
    [element] = [int(file.name.rpartition("-")[2]) for file in tmp_path.glob("2-0-*")]
    wait_until(lambda: are_gone([element]))


MAP_OVER_TWO = """
import functools, sys
from resources.process import descendants
from tasks.local_map import crew_map
from tests.map_tasks import waits
crew_map(functools.partial(waits, folder=sys.argv[1]))(number=[1, 2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("word", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_elements_flush_and_end_with_the_process_that_maps_however_that_ends(tmp_path, word, is_stopped):
    mapper = subprocess.Popen([sys.executable, "-c", MAP_OVER_TWO, tmp_path], stderr=subprocess.PIPE)
    wait_until(lambda: len(list(tmp_path.glob("waits-*"))) == 2)
    elements = {int(file.name.rsplit("-", 1)[1]) for file in tmp_path.glob("waits-*")}
    everything = descendants(mapper.pid)
    assert elements < set(everything)  # the starter is among them
    if is_stopped:
        os.kill(min(elements), signal.SIGSTOP)
    mapper.send_signal(word)
    mapper.communicate(timeout=300)
    assert mapper.returncode != 0
    wait_until(lambda: are_gone(everything))
    assert sorted(file.name for file in tmp_path.glob("flushed-*")) == ["flushed-1", "flushed-2"]


@pytest.mark.slow
def test_a_standing_map_runs_beside_what_follows_with_attempts_and_says_when_it_has_ended(tmp_path):
    ended = []
    mapped = crew_map(functools.partial(lasts, folder=str(tmp_path)), stands=True)
    assert mapped(slot=[5, 1]) == [None, None]
    after_standing_map(lambda: ended.append(1))
    wait_until(lambda: attempts(tmp_path, 5) == [0] and attempts(tmp_path, 1) == [0, 1])
    assert not ended
    (tmp_path / "end").touch()
    wait_until(lambda: ended == [1])
    after_standing_map(lambda: ended.append(2))
    assert ended == [1, 2]


IMPORTS_AHEAD = """
import sys
from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from resources.local_starter import _running
from tasks.local_map import import_ahead
from tests.processes import wait_until
context = FlyteContextManager.current_context()
state = context.new_execution_state().with_params(mode=ExecutionState.Mode[sys.argv[1]])
with FlyteContextManager.with_context(context.with_execution_state(state)):
    import_ahead(("leaves_a_mark",))
wait_until(lambda: not _running or __import__("os").path.exists("mark"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "marks"), [("LOCAL_DYNAMIC_TASK_EXECUTION", 1), ("DYNAMIC_TASK_EXECUTION", 0)])
def test_what_elements_need_is_imported_ahead_where_they_run_on_this_machine(tmp_path, mode, marks):
    (tmp_path / "leaves_a_mark.py").write_text("open('mark', 'a').write('1')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", IMPORTS_AHEAD, mode]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    assert len(list(tmp_path.glob("mark"))) == marks


STANDING_MAP = """
import functools, sys, time
from tasks.local_map import crew_map
from tests.map_tasks import waits
crew_map(functools.partial(waits, folder=sys.argv[1]), stands=True)(number=[1, 2])
while not list(__import__("pathlib").Path(sys.argv[1]).glob("go-on")):
    time.sleep(0.05)
if len(sys.argv) > 2:
    raise RuntimeError(sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, "by itself", "with an error"])
def test_standing_elements_flush_and_end_with_the_process_however_that_ends(tmp_path, ends):
    error = [ends] if ends == "with an error" else []
    mapper = subprocess.Popen([sys.executable, "-c", STANDING_MAP, tmp_path, *error], stderr=subprocess.PIPE)
    wait_until(lambda: len(list(tmp_path.glob("waits-*"))) == 2)
    everything = descendants(mapper.pid)
    if isinstance(ends, str):
        (tmp_path / "go-on").touch()
    else:
        mapper.send_signal(ends)
    mapper.communicate(timeout=300)
    assert (mapper.returncode == 0) == (ends == "by itself")
    wait_until(lambda: are_gone(everything))
    assert sorted(file.name for file in tmp_path.glob("flushed-*")) == ["flushed-1", "flushed-2"]


def serialised(mapper):
    @workflow
    def wf() -> list[int | None]:
        outputs: list[int | None] = mapper(functools.partial(element, folder="f"), concurrency=2)(number=[1, 2])
        return outputs

    node = next(iter(get_serializable({}, SETTINGS, wf).template.nodes))
    return node.to_flyte_idl()


def test_it_serialises_to_flytes_ordinary_array_node():
    """Which succeeds however many elements fail."""
    assert serialised(crew_map) == serialised(functools.partial(map_task, min_success_ratio=0.0))


def test_its_node_bears_the_title_that_the_console_shows():
    assert serialised(functools.partial(crew_map, title="iteration 2 of 3: rollout")).metadata.name.endswith("rollout")
