"""`gleaner join` as a process: it works, leaves on SIGTERM and Ctrl-C without loss, and says what is wrong."""

import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage.journal.assembly import JournalReader
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.run import read_plan, read_run
from storage.stores.connect import connect
from tasks.configuration.run_config import dump, parse
from tests.forked import ForkedScript
from tests.small_run import config, model_directory, plan_iteration, roll_out

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LIMIT_S = 600
DYING_ENGINE = """
from gleaner import main
from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.scripted_engine import ScriptedEngine

def dies(engine):
    raise EngineDied("CUDA error: unspecified launch failure\\nCompile with TORCH_USE_CUDA_DSA")

ScriptedEngine.step = dies
main()
"""


def join(url: str, *options: str) -> ForkedScript:
    return ForkedScript(ROOT / "gleaner.py", "join", url, *options)


def planned(folder: Path) -> str:
    rollout = {"engine": "torch", "device": "cpu", "max_responses_in_flight": 2, "flush_interval_s": 0.1}
    settings = config(
        str(folder / "run"),
        model_directory(folder / "model"),
        rollout=rollout,
        sampling={"max_completion_length": 90},
    )
    plan_iteration(settings)
    return settings.run.url


def responses(url: str):
    plan = read_plan(connect(url), 0)
    reader = JournalReader(connect(url), plan)
    reader.refresh()
    return [reader.assemble(response) for response in range(plan.num_responses)]


@pytest.mark.parametrize("word", [signal.SIGTERM, signal.SIGINT])
def test_told_to_leave_it_ends_well_and_another_machine_goes_on(tmp_path, word):
    url = planned(tmp_path)
    first = join(url)
    deadline_s = time.monotonic() + LIMIT_S
    while not any("/journal/" in key for key in connect(url).list("iterations/")):
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    first.send_signal(word)
    told, errors = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 0, errors
    assert "left after helping with 1 iteration" in told
    [alive] = [records.read(connect(url), HeartbeatRecord, key) for key in connect(url).list(layout.alive_all(0))]
    assert alive.state == "gone"
    assert alive.tokens_generated == sum(len(response.token_ids) for response in responses(url)) > 0

    second = join(url, "--iterations", "1", "--usd-per-hour", "0.5")
    told, errors = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, errors
    assert told.splitlines()[0] == "here run: the engine 'torch'; functions: none that the run names"
    assert "iteration 0:" in told
    (tmp_path / "alone").mkdir()
    other = planned(tmp_path / "alone")
    roll_out(other, 0)
    for joined, alone in zip(responses(url), responses(other), strict=True):
        assert joined.finish.ends_response
        assert np.array_equal(joined.token_ids, alone.token_ids)


def test_before_the_run_begins_it_waits_says_so_and_works_when_it_has(tmp_path):
    url = str(tmp_path / "run")
    early = join(url, "--iterations", "1")
    told = early.stderr.readline()
    assert told.startswith(f"waiting for a run to begin at {url}, which holds no run.json yet, since ")
    assert not (tmp_path / "run").exists()
    assert planned(tmp_path) == url
    told, errors = early.communicate(timeout=LIMIT_S)
    assert early.returncode == 0, errors
    assert "left after helping with 1 iteration" in told
    assert all(response.finish.ends_response for response in responses(url))


def test_a_wait_for_a_run_ends_with_its_limits_and_at_a_notice(tmp_path):
    url = str(tmp_path / "nothing")
    for options in (("--time-limit-s", "0.1"), ("--patience-s", "0.1")):
        done = join(url, *options)
        told, errors = done.communicate(timeout=LIMIT_S)
        assert (done.returncode, told) == (0, "left after helping with 0 iterations\n"), errors
    waiting = join(url)
    assert "waiting for a run to begin" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGTERM)
    told, errors = waiting.communicate(timeout=LIMIT_S)
    assert (waiting.returncode, told, errors) == (0, "left after helping with 0 iterations\n", "")


def test_it_says_in_one_line_where_there_can_be_no_run(tmp_path):
    (tmp_path / "file").write_text("a model, perhaps")
    for url in (str(tmp_path / "file"), str(tmp_path / "file" / "run")):
        done = join(url)
        _, errors = done.communicate(timeout=LIMIT_S)
        assert done.returncode == 1
        assert errors.startswith("gleaner: cannot get 'run.json' in ")
        assert errors.count("\n") == 1


def test_an_engine_that_dies_for_good_is_said_in_one_line_and_holds_nothing_back(tmp_path):
    settings = config(str(tmp_path / "run"), model_directory(tmp_path / "model"))
    plan_iteration(settings)
    url = settings.run.url
    (tmp_path / "dying.py").write_text(DYING_ENGINE)
    done = ForkedScript(tmp_path / "dying.py", "join", url, "--iterations", "1")
    _, errors = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 1
    [line] = [line for line in errors.splitlines() if line.startswith("gleaner: ")]
    assert line.startswith("gleaner: the engine died, 2 of 2 restarts tried: CUDA error: unspecified launch failure")
    assert "Traceback" not in errors
    [alive] = [records.read(connect(url), HeartbeatRecord, key) for key in connect(url).list(layout.alive_all(0))]
    assert alive.state == "gone"
    roll_out(url, 0)
    assert all(response.finish.ends_response for response in responses(url))


def test_functions_that_the_run_names_are_refused_in_one_line_that_says_how_to_allow_them(tmp_path):
    url = planned(tmp_path)
    for key, record in ((layout.RUN, read_run(connect(url))), (layout.plan(0), read_plan(connect(url), 0))):
        whole = dump(parse({**record.config, "turns": {"tools": ["tests.tool_functions:note"]}}))
        records.put(connect(url), key, replace(record, config=whole))
    for options in ((), ("--run-tools", "tests"), ("--run-tools", "tests.tool_functions:add")):
        done = join(url, *options)
        told, errors = done.communicate(timeout=LIMIT_S)
        assert (done.returncode, told, errors.count("\n")) == (1, "", 1)
        assert "names tests.tool_functions:note" in errors
        assert "--run-tools tests.tool_functions for modules that you trust" in errors
    allowed = join(url, "--run-tools", "another", "--run-tools", "tests.tool_functions", "--time-limit-s", "0.5")
    told, errors = allowed.communicate(timeout=LIMIT_S)
    assert allowed.returncode == 0, errors
    assert told.splitlines()[0] == "here run: the engine 'torch'; functions: tests.tool_functions:note"
