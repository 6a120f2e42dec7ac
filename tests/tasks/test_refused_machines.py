"""Plan, members and the trainer look at what their pod was granted before anything else."""

import logging

import pytest

from resources.granted import MachineTooSmall
from storage import layout
from storage.clock import SystemClock
from storage.memory import MemoryStore
from storage.weights.tensor_sets import published_bytes
from tasks.learning.advance import advance
from tasks.preparing.iteration import prepare
from tasks.sampling.session.member import generate_slot
from tasks.sampling.session.standing import Post, stand
from tests.small_run import config, memory_store, model_directory

URL = "memory://refused"
CLOCK = SystemClock()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


def planned(model, **pools):
    store = memory_store("refused")
    prepare(config(URL, model, pools=pools), "test", CLOCK)
    return store


def in_a_pod(monkeypatch):
    """From here on this process takes itself for a pod; the machines of tests have no GPU."""
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


POST = Post(run_url=URL, execution="test", slot=0, first=0, iterations=1)
WORK = {
    "rollout": [
        lambda: generate_slot(URL, 0, 0, lambda: False, CLOCK, execution="test"),
        lambda: stand(POST, lambda: False, CLOCK),
    ],
    "train": [lambda: advance(URL, 0, "test", CLOCK)],
}


@pytest.mark.parametrize(("pool", "number"), [("rollout", 0), ("rollout", 1), ("train", 0)])
def test_a_pod_without_the_gpus_of_its_pool_is_refused_before_it_works(monkeypatch, model, pool, number):
    store = planned(model, **{pool: {"gpus": 1}})
    before = set(store.list(""))
    in_a_pod(monkeypatch)
    with pytest.raises(MachineTooSmall, match=rf"^pools\.{pool}\.gpus: value 1; this pod sees 0\."):
        WORK[pool][number]()
    assert set(store.list("")) == before


def test_a_plan_is_refused_before_the_run_is_there(monkeypatch, model):
    store = memory_store("refused")
    in_a_pod(monkeypatch)
    with pytest.raises(MachineTooSmall, match=r"^pools\.control\.gpus: value 1"):
        prepare(config(URL, model, pools={"control": {"gpus": 1}}), "test", CLOCK)
    assert not list(store.list(""))


def test_what_was_granted_is_the_first_line_of_a_plan(monkeypatch, model, caplog):
    caplog.set_level(logging.INFO)
    memory_store("refused")
    in_a_pod(monkeypatch)
    prepare(config(URL, model), "test", CLOCK)
    assert caplog.messages[0].startswith(f"plan of {URL}: granted ")
    assert "pools.control asks for cpu 1, memory 4Gi, gpus 0" in caplog.messages[0]


def test_what_was_granted_is_the_first_line_of_a_member(monkeypatch, model, caplog):
    planned(model)
    in_a_pod(monkeypatch)
    caplog.clear()
    caplog.set_level(logging.INFO)
    WORK["rollout"][0]()
    assert caplog.messages[0].startswith(f"slot 0 of iteration 0 of {URL}: granted ")


def test_the_bytes_of_what_a_task_must_hold(model):
    store = planned(model)
    assert published_bytes(store, layout.weights(0)) > 0
    assert published_bytes(MemoryStore(), layout.weights(0)) == 0
