"""A crew of real processes, killed at random moments, on every kind of store: the tokens are the undisturbed ones."""

import json
import time
import uuid
from pathlib import Path

import pytest

from storage.journal.assembly import JournalReader
from storage.records import layout
from storage.records.run import read_plan
from storage.stores.connect import connect
from tests.forked import ForkedScript
from tests.small_run import config, memory_store, model_directory, plan_iteration, roll_out

pytestmark = pytest.mark.slow

SLOTS = 2
KILLS = 4
LIMIT_S = 600

# The engine takes its time, so that a kill strikes in the middle of responses.
WORKER = """
import dataclasses, json, sys
from storage.clock import SystemClock
from tasks.sampling.session.member import generate_slot
from tasks.sampling.engines.scripted_engine import ScriptedEngine

def build(rollout, model_dir, vocab_size):
    return ScriptedEngine(vocab_size, 4, clock=SystemClock(), step_time_s=lambda _: 0.03)

outcome = generate_slot(sys.argv[1], 0, int(sys.argv[2]), lambda: False, SystemClock(), build)
print(json.dumps(dataclasses.asdict(outcome)))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["local directory", "moto, serialised", "radosgw", "azurite"])
def url(request, tmp_path):
    """Of a run on each store."""
    fixture = {"moto, serialised": "s3_url", "radosgw": "radosgw_url", "azurite": "azurite_url"}.get(request.param)
    return str(tmp_path / "run") if fixture is None else f"{request.getfixturevalue(fixture)}/{uuid.uuid4().hex}"


def plan(url: str, model: Path) -> None:
    fast = {"flush_interval_s": 0.05, "claim_ttl_s": 5.0}
    plan_iteration(config(url, model, sampling={"max_completion_length": 120}, rollout=fast))


def tokens(url: str) -> list[list[int]]:
    store = connect(url)
    plan = read_plan(store, 0)
    reader = JournalReader(store, plan)
    reader.refresh()
    assembled = [reader.assemble(response) for response in range(plan.num_responses)]
    assert all(each.finish.ends_response for each in assembled)
    return [each.token_ids.tolist() for each in assembled]


def wait_for_shards(url: str, more_than: int, worker: ForkedScript) -> int:
    """Return the number of shards in the journal once there are more, or the worker has ended."""
    store = connect(url)
    give_up_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_s:
        shards = len(store.list(layout.journal(0)))
        if shards > more_than or worker.poll() is not None:
            return shards
        time.sleep(0.02)
    pytest.fail(f"no shard within {LIMIT_S} s")


def run_killed_crew(url: str, script: Path) -> tuple[int, list[dict[str, int]]]:
    """Kill the slots in turn, each time a few shards after the last; how many died, and what the last lives say."""
    workers = [ForkedScript(script, url, str(slot)) for slot in range(SLOTS)]
    killed = shards = 0
    try:
        for number in range(KILLS):
            slot = number % SLOTS
            shards = wait_for_shards(url, shards + 3, workers[slot])
            if workers[slot].poll() is None:
                workers[slot].kill()
                workers[slot].communicate()
                workers[slot] = ForkedScript(script, url, str(slot))
                killed += 1
        outcomes = []
        for worker in workers:
            output, errors = worker.communicate(timeout=LIMIT_S)
            assert worker.returncode == 0, errors
            outcomes.append(json.loads(output))
    finally:
        for worker in workers:
            worker.kill()
    return killed, outcomes


def test_a_killed_crew_ends_with_the_tokens_of_an_undisturbed_one(url, model, tmp_path):
    memory_store("crew")
    plan("memory://crew", model)
    roll_out("memory://crew", 0)
    plan(url, model)
    (tmp_path / "worker.py").write_text(WORKER)
    killed, outcomes = run_killed_crew(url, tmp_path / "worker.py")
    assert tokens(url) == tokens("memory://crew")
    assert killed > 0
    assert sum(outcome["tokens_recovered"] for outcome in outcomes) > 0
