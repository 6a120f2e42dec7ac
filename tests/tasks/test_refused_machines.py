"""Plan, members and the trainer look at what their pod was granted before anything else."""

import logging

import pytest
import torch
from flytekit.exceptions.user import FlyteRecoverableException

from resources import granted as granted_module
from resources.granted import Granted, MachineTooSmall
from storage.clock import SystemClock
from storage.records import layout
from storage.records.failures import slot_failures
from storage.stores.memory import MemoryStore
from storage.weights.tensor_sets import published_bytes
from tasks.configuration.references import PlanReference
from tasks.device.gpu_check import WrongGpus
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.rollout import rollout
from tasks.sampling.session.member import generate_slot
from tasks.sampling.session.standing import Post, stand
from tasks.sharing.phase_trainer import PhaseTrainer
from tasks.train import train
from tests.small_run import EXECUTION, config, memory_store, model_directory

URL = "memory://refused"
CLOCK = SystemClock()
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


def planned(model, **pools):
    store = memory_store("refused")
    prepare(config(URL, model, pools=pools, rollout={"engine": "torch"}), EXECUTION, CLOCK)
    return store


def in_a_pod(monkeypatch):
    """From here on this process takes itself for a pod; the machines of tests have no GPU."""
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "abc")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


POST = Post(run_url=URL, execution=EXECUTION, slot=0, first=0, iterations=1)
WORK = {
    "rollout": [
        lambda: generate_slot(URL, 0, 0, lambda: False, CLOCK, execution=EXECUTION),
        lambda: stand(POST, lambda: False, CLOCK),
    ],
    "train": [
        lambda: train_iteration(URL, 0, EXECUTION, CLOCK),
        lambda: PhaseTrainer(URL, CLOCK, lambda _: None).train(0),
    ],
}


@without_gpu
@pytest.mark.parametrize(("pool", "number"), [("rollout", 0), ("rollout", 1), ("train", 0), ("train", 1)])
def test_a_pod_without_the_gpus_of_its_pool_is_refused_before_it_works(monkeypatch, model, pool, number):
    store = planned(model, **{pool: {"gpus": 1}})
    before = set(store.list(""))
    in_a_pod(monkeypatch)
    with pytest.raises(WrongGpus, match=rf"^pools\.{pool}\.gpus: value 1, and torch sees no GPU"):
        WORK[pool][number]()
    assert set(store.list("")) == before


@without_gpu
@pytest.mark.parametrize(("cuda", "kind"), [("13.0", "TaskFailedForNow"), (None, "TaskFailed")])
def test_another_node_is_tried_unless_the_image_is_to_blame(monkeypatch, model, cuda, kind):
    store = planned(model, rollout={"gpus": 1}, train={"gpus": 1})
    monkeypatch.setattr(torch.version, "cuda", cuda)
    in_a_pod(monkeypatch)
    plan = PlanReference(run_url=URL, iteration=0, weight_version=0, execution=EXECUTION)
    tasks = {"rollout": lambda: rollout.task_function(0, plan), "train": lambda: train.task_function(plan)}
    for pool, task in tasks.items():
        with pytest.raises(Exception, match=rf"pools\.{pool}\.gpus: value 1, and torch sees no GPU") as refused:
            task()
        assert type(refused.value).__name__ == kind
        assert isinstance(refused.value, FlyteRecoverableException) == (cuda is not None)
        assert "Nothing was done yet" in str(refused.value).partition("\n")[0]
    assert [*slot_failures(store, 0, EXECUTION)] == [0]


def test_a_plan_is_refused_before_the_run_is_there(monkeypatch, model):
    store = memory_store("refused")
    in_a_pod(monkeypatch)
    small = Granted(cpus=1.0, memory_bytes=64 << 20, gpus=0)
    monkeypatch.setattr(granted_module, "granted", lambda: small)
    with pytest.raises(MachineTooSmall, match=r"^pools\.control\.memory: value 4Gi; this pod is limited to 0\.06 GiB"):
        prepare(config(URL, model), EXECUTION, CLOCK)
    assert not list(store.list(""))


def test_what_was_granted_is_the_first_line_of_a_plan(monkeypatch, model, caplog):
    caplog.set_level(logging.INFO)
    memory_store("refused")
    in_a_pod(monkeypatch)
    prepare(config(URL, model), EXECUTION, CLOCK)
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
