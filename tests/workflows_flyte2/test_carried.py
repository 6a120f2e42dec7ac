"""What a body of ours meets under Flyte 2: failures that another attempt may mend, a notice, a name, a report."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter

import flyte.errors
import pytest
from flyteidl2.core.execution_pb2 import ContainerError, ErrorDocument

from resources.notice import EXIT_CODE
from tests.flyte2_runs import local_run
from tests.flyte2_tasks import element_inside, elements, ends_early

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def attempts(folder) -> dict[str, int]:
    return dict(Counter(file.name.partition("-")[0] for file in folder.iterdir()))


@pytest.mark.parametrize("width", [0, 2])
def test_members_of_a_group_fail_alone_and_come_again_after_a_kill(tmp_path, width):
    run = local_run(elements, {"slots": [0, 1, 2, 3, 4], "width": width}, folder=str(tmp_path))
    zero, one, two, three, four = run.outputs()[0]
    assert (zero, one, two) == ("0", "1", "4")
    assert three == "three is not allowed"
    assert "exit code -9" in four
    assert attempts(tmp_path) == {"0": 1, "1": 2, "2": 2, "3": 1, "4": 2}


def test_a_task_in_a_thread_comes_again_only_where_it_may_help(tmp_path):
    assert local_run(element_inside, {"slot": 2}, folder=str(tmp_path)).outputs()[0] == 4
    with pytest.raises(flyte.errors.RuntimeUserError, match="three is not allowed") as raised:
        local_run(element_inside, {"slot": 3}, folder=str(tmp_path))
    assert raised.value.code == "ValueError"
    assert attempts(tmp_path) == {"2": 2, "3": 1}


def pod(name, folder, **inputs):
    """A process that does with a task what a pod does."""
    command = [
        sys.executable,
        "-m",
        "tests.flyte2_pod",
        name,
        json.dumps({"folder": str(folder)} | inputs),
        str(folder),
    ]
    return subprocess.Popen(command)


def test_in_a_pod_a_body_sees_the_run_of_flyte_2_from_the_main_thread_and_its_deck_is_the_report(tmp_path):
    assert pod("SEEN", tmp_path).wait(300) == 0
    assert b"run-1 True True" in (tmp_path / "outputs.pb").read_bytes()
    assert f"<p>{tmp_path}</p>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("slot", "recoverable"), [(2, True), (3, False)])
def test_in_a_pod_the_error_says_whether_another_attempt_may_help(tmp_path, slot, recoverable):
    assert pod("APART", tmp_path, slot=slot).wait(300) == 0
    assert not (tmp_path / "outputs.pb").exists()
    error = ErrorDocument.FromString((tmp_path / "error.pb").read_bytes()).error
    assert (error.kind == ContainerError.Kind.RECOVERABLE) is recoverable


def test_a_notice_reaches_a_member_in_a_pod(tmp_path):
    child = pod("WAITS", tmp_path)
    while not (tmp_path / "waits").exists():
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    assert child.wait(300) == EXIT_CODE
    assert (tmp_path / "flushed").exists()


def test_a_run_that_fails_tells_its_members_to_end(tmp_path):
    with pytest.raises(flyte.errors.RuntimeUserError, match="enough"):
        local_run(ends_early, {}, folder=str(tmp_path))
    assert (tmp_path / "flushed").exists()
