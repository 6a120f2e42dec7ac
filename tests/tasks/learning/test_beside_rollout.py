"""Training while rollouts run, as on a cluster: real processes write the journal, one dies, the trainer follows."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from resources.local_starter import StartedProcess, running_starter
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.records import BatchRecord
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from tasks.learning.journal_follower import GroupTimeout
from tasks.rollout import IMPORTS
from tests.small_run import (
    commit_iteration,
    config,
    everything,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LIMIT_S = 600.0
MEMBER = """
import sys
from storage.clock import SystemClock
from tasks.sampling.session.member import generate_slot
generate_slot(sys.argv[1], 0, int(sys.argv[2]), lambda: False, SystemClock())
"""


class ReadStore(MemoryStore):
    """A store that keeps which keys were read."""

    def __init__(self, name: str, objects: dict[str, bytes]) -> None:
        super().__init__(name)
        for key, body in objects.items():
            self.create(key, body)
        self.keys: list[str] = []

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.keys.append(key)
        return super().get(key, start, end)


def crew(url: str, script: Path, victim: int, outcome: list[int]) -> None:
    """Both slots; the victim is killed after its first shard and started again."""
    starter = running_starter(os.environ | {"PYTHONPATH": str(ROOT)})

    def member(slot: int) -> StartedProcess:
        return starter.start([str(script), url, str(slot)], os.environ, IMPORTS)

    store = connect(url)
    members = [member(slot) for slot in range(2)]
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        time.sleep(0.005)
        beats = [records.read(store, HeartbeatRecord, key) for key in store.list(layout.alive_all(0))]
        names = [beat.incarnation for beat in beats if beat.slot == victim and beat.state == "working"]
        if names and store.list(layout.shard(0, names[0], 0)):
            members[victim].send_signal(signal.SIGKILL)
            break
    outcome.append(members[victim].wait(LIMIT_S))
    members[victim] = member(victim)
    outcome.extend(process.wait(LIMIT_S) for process in members)


@pytest.mark.parametrize("order", ["plan", "arrival"])
def test_the_trainer_follows_a_crew_that_loses_a_member(tmp_path, order):
    settings = config(
        str(tmp_path / "run"),
        model_directory(tmp_path / "model"),
        run={"num_prompts_per_step": 12, "num_generations": 4},
        sampling={"max_completion_length": 80},
        rollout={
            "engine": "torch",
            "context_length": 250,
            "max_responses_in_flight": 6,
            "flush_interval_s": 0.05,
        },
        algorithm={"micro_batch_order": order},
        trainer={"group_timeout_s": LIMIT_S, "micro_batch_tokens_max": 900},
    )
    plan_iteration(settings)
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    outcome: list[int] = []
    thread = threading.Thread(target=crew, args=(settings.run.url, script, 1, outcome))
    thread.start()
    train_small(settings.run.url, 0)
    thread.join()
    assert outcome == [-signal.SIGKILL, 0, 0]
    report = commit_iteration(settings.run.url, 0)
    assert report.metrics["preempt/count"] == 1
    assert report.metrics["resume/tokens_recovered"] > 0
    store = connect(settings.run.url)
    batches = [records.read(store, BatchRecord, key) for key in store.list(layout.batches(0))]
    assert len(batches) > 2
    groups = [graded.response // 4 for batch in batches for graded in batch.responses][::4]
    assert sorted(groups) == list(range(12))
    assert order == "arrival" or groups == sorted(groups)


def test_the_trainer_restores_its_checkpoint_before_any_response_is_there(tmp_path):
    store = memory_store("beside")
    settings = config("memory://beside", model_directory(tmp_path / "model"), trainer={"group_timeout_s": 0.2})
    plan_iteration(settings)
    roll_out(settings.run.url, 0)
    train_small(settings.run.url, 0)
    commit_iteration(settings.run.url, 0)
    plan_iteration(settings)
    watched = ReadStore("beside", everything(store))
    memory_store("beside", watched)
    with pytest.raises(GroupTimeout):
        train_small(settings.run.url, 1)
    manifest = layout.manifest(layout.checkpoint(1))
    read = [key for key in watched.keys if key.startswith(layout.checkpoint(1)) and key != manifest]
    assert {key for key in watched.list(layout.checkpoint(1)) if key != manifest} == set(read)
    assert not watched.list(layout.journal(1))
