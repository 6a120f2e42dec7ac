"""Scorers as a user runs them: `pyflyte run`, a map of real processes beside the rollout, one of which is killed."""

import os
import signal
import threading
import time

import pytest

from storage.journal.liveness import read_heartbeat
from storage.records import layout
from storage.records.run import reports
from storage.stores.connect import connect
from storage.stores.memory import NestedStore
from tests.whole_runs import ONE_SLOT, config_file, train_here

pytestmark = pytest.mark.slow
LIMIT_S = 600


def kill_a_scorer_with_a_claim(store, killed):
    """SIGKILL the first scorer of iteration 0 that has claimed a group, before or while the group is scored."""
    scoring, ends_s = NestedStore(store, layout.scoring(0).rstrip("/")), time.monotonic() + LIMIT_S
    while time.monotonic() < ends_s:
        if scoring.list(layout.claims(0)):
            [key] = scoring.list(layout.alive_all(0))
            os.kill(read_heartbeat(scoring, key).pid, signal.SIGKILL)
            killed.append(key)
            return
        time.sleep(0.005)


def test_a_run_with_scorers_goes_on_after_the_kill_of_one(tmp_path, model):
    url, killed = str(tmp_path / "run"), []
    pools = ONE_SLOT | {"scoring": {"scorers": {"count": 1, "interruptible": True}}}
    teacher = {"path": str(model), "pool": "scorers"}
    config = config_file(tmp_path, model, url, teacher=teacher, rollout={"engine": "scripted"}, pools=pools)
    store = connect(url)
    killer = threading.Thread(target=kill_a_scorer_with_a_claim, args=(store, killed))
    killer.start()
    train_here(config, "--count", "2")
    killer.join(1)
    assert len(killed) == 1
    first, second = reports(store)
    # The teacher is the policy that the run begins with.
    assert first.metrics["teacher/kl"] == pytest.approx(0, abs=1e-5)
    assert second.metrics["teacher/kl"] != 0
    assert store.list(layout.scoring(0)) == []
    assert any("/teacher/" in key for key in store.list(layout.iteration(0)))
