"""VLLM's processes killed and stopped under us, and we under them: nothing hangs, nothing stays, nothing changes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from storage.clock import SystemClock
from storage.stores.memory import MemoryStore
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.engine import EngineDied, EngineError
from tasks.sampling.engines.testing import CONTEXT_LENGTH, ENDLESS, Result, assert_same, drain, request, resumed, run
from tasks.sampling.engines.vllm_engine import VllmEngine
from tasks.sampling.engines.vllm_settings import Limits
from tasks.sampling.session.session import Session
from tasks.sampling.session.session_config import SessionConfig
from tests.sessions import PROMPTS, a_plan, responses
from tests.tiny_model import VOCAB_SIZE, tiny_model, weight_blocks
from tests.vllm_engines import MISSING, WHY_NOT, vllm_tiny_config

pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
STEP_TIMEOUT_S = 8.0
OWNER = """
import sys
from pathlib import Path
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.vllm_engine import VllmEngine
if __name__ == "__main__":
    engine = VllmEngine(Path(sys.argv[1]), vocab_size=96, dtype="float32", max_responses_in_flight=2, context_length=64)
    print("ready", flush=True)
    sys.stdin.read()
"""


def make_engine(model_dir, **limits):
    return VllmEngine(
        model_dir,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        max_responses_in_flight=8,
        context_length=CONTEXT_LENGTH,
        config=VllmConfig(process="own"),
        limits=Limits(**limits),
    )


@pytest.fixture(scope="module")
def model():
    return tiny_model(vllm_tiny_config())


@pytest.fixture(scope="module")
def model_dir(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(model_dir):
    engine = make_engine(model_dir, step_s=STEP_TIMEOUT_S)
    yield engine
    engine.close()


def engine_process():
    return next(child.pid for child in multiprocessing.active_children() if "EngineCore" in child.name)


def children(pid):
    """Process ids of a process's children, from /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def alive(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids, limit_s=20.0):
    end_s = time.monotonic() + limit_s
    while any(map(alive, pids)) and time.monotonic() < end_s:
        time.sleep(0.1)
    return [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize(
    ("whom", "what", "message"),
    [
        ("engine", signal.SIGKILL, "EngineDeadError"),
        ("worker", signal.SIGKILL, "EngineDeadError"),
        ("engine", signal.SIGSTOP, "sent no token for 8 s"),
    ],
)
def test_whatever_happens_to_its_processes_it_dies_in_words_and_goes_on_after_a_restart(
    engine, model, whom, what, message
):
    engine.load_weights(0, weight_blocks(model))
    requests = [request(r, ENDLESS) for r in range(8)]
    whole = run(engine, requests)
    engine.start(requests)
    results = drain(engine, {r: Result() for r in range(8)}, max_steps=2)
    core = engine_process()
    workers = children(core)
    os.kill(core if whom == "engine" else workers[0], what)
    began_s = time.monotonic()
    with pytest.raises(EngineDied, match=message):
        drain(engine, results)
    assert time.monotonic() - began_s < STEP_TIMEOUT_S + 30.0
    with pytest.raises(EngineDied, match="restart"):
        engine.start(requests[:1])
    assert not wait_until_gone([core, *workers])
    engine.restart()
    with pytest.raises(EngineError, match="load_weights"):
        engine.start(requests[:1])
    engine.load_weights(0, weight_blocks(model))
    engine.start([resumed(requests[r], result.token_ids) for r, result in results.items() if not result.finish_reason])
    assert_same(drain(engine, results), whole)


def test_a_session_whose_engine_is_killed_ends_with_the_undisturbed_tokens(engine, model):
    """At most what vLLM had not sent is decoded again; here the journal had nothing yet."""
    config = SessionConfig(
        slot=0,
        pool="rollout",
        host="here",
        pid=0,
        flush_interval_s=60.0,
        heartbeat_interval_s=60.0,
        claim_ttl_s=180.0,
        idle_timeout_s=60.0,
        engine_restarts_max=1,
    )

    def session(store, steps_until_kill):
        steps = iter(range(1000))

        def notice():
            if next(steps) == steps_until_kill:
                os.kill(engine_process(), signal.SIGKILL)
            return False

        return Session(
            store,
            a_plan(),
            prompts=PROMPTS,
            engine=engine,
            load=lambda into, _: into.load_weights(0, weight_blocks(model)),
            config=config,
            clock=SystemClock(),
            notice=notice,
        )

    undisturbed, killed = MemoryStore(), MemoryStore()
    outcome = session(undisturbed, None).run()
    assert session(killed, 12).run().tokens_generated == outcome.tokens_generated
    for (ids, logprobs, end), (ids_2, logprobs_2, end_2) in zip(responses(undisturbed), responses(killed), strict=True):
        assert (ids, end) == (ids_2, end_2)
        assert logprobs == pytest.approx(logprobs_2, abs=1e-4)


def test_it_does_not_outlive_a_killed_owner(model_dir):
    command = [sys.executable, "-c", OWNER, str(model_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert "ready\n" in iter(owner.stdout.readline, "")  # vLLM's warnings come before it
        core = [pid for pid in children(owner.pid) if children(pid)]
        doomed = [*core, *(worker for pid in core for worker in children(pid))]
        assert len(doomed) >= 2
        owner.kill()
    assert not wait_until_gone(doomed)


def test_a_start_that_takes_too_long_is_given_up_and_leaves_nothing(model_dir):
    before = set(multiprocessing.active_children())
    with pytest.raises(EngineDied, match=r"vLLM was still starting after 3 s"):
        make_engine(model_dir, start_s=3.0)
    left = [child.pid for child in set(multiprocessing.active_children()) - before]
    assert not wait_until_gone(left)
