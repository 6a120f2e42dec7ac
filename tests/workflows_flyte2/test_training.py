"""Whole runs under Flyte 2, against the same runs under flytekit."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from flyte.errors import RuntimeUserError

from examples.compare import undisturbed_equals
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.run import read_plan, reports
from storage.stores.connect import connect
from storage.weights.stored_versions import list_versions
from storage.weights.tensor_sets import read_manifest
from tests.flyte2_runs import run_local
from tests.small_run import learned
from tests.whole_runs import KILLABLE, ONE_SLOT, config_file, kill_a_slot_in_the_middle, train_here
from workflows_flyte2.training import training

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

# What is learned depends on no arrival and on no sampler. Random policies do not add, but differ in their lengths.
REPEATABLE = KILLABLE | {
    "algorithm": {"old_logprobs": "trainer", "micro_batch_order": "plan"},
    "rewards": [{"function": "tests.reward_functions:even_length"}],
}
# Of members' work, which a kill changes.
OF_THE_CREW = ("balance/", "cost/", "plan/", "preempt/", "resume/", "rollout/", "seeding/", "replay/")


def of_iterations(url: str) -> list[dict[str, float]]:
    """What each iteration of a run has learned, and the digest of the weights after it."""
    store = connect(url)
    return [
        {name: value for name, value in learned(report.metrics).items() if not name.startswith(OF_THE_CREW)}
        for report in reports(store)
    ]


def weights(url: str) -> dict[int, list[str]]:
    """The digests of the tensors of each version that the run keeps."""
    store = connect(url)
    versions = list_versions(store, layout.WEIGHTS).complete
    return {
        version: [entry.digest for _, entry in sorted(read_manifest(store, layout.weights(version)).tensors.items())]
        for version in versions
    }


def test_both_sdks_in_turn_and_a_killed_member_change_nothing_that_is_learned(tmp_path, model):
    """Of four iterations two are made under Flyte 2, with a member killed, one under flytekit, and the last again."""
    alone, taken_in_turns = str(tmp_path / "alone"), str(tmp_path / "turns")
    train_here(config_file(tmp_path / "given", model, alone, **REPEATABLE), "--count", "4")

    config, store = config_file(tmp_path / "given", model, taken_in_turns, **REPEATABLE), connect(taken_in_turns)
    with ThreadPoolExecutor(1) as thread:
        trained = thread.submit(run_local, training, config, count=2)
        victim = kill_a_slot_in_the_middle(store, lambda: not trained.done())
        assert trained.result().iteration == 1
    train_here(config, "--count", "1")
    assert run_local(training, config, count=1).weight_version == 4

    assert victim in {life.incarnation for life in reports(store)[0].lives if life.state == "lost"}
    assert reports(store)[0].metrics["resume/tokens_recovered"] > 0
    assert undisturbed_equals(taken_in_turns, 0)[:2] == (32, 32)
    assert of_iterations(taken_in_turns) == of_iterations(alone)
    assert len({metrics["reward"] for metrics in of_iterations(alone)}) > 1
    assert weights(taken_in_turns) == weights(alone)
    assert len({str(digests) for digests in weights(alone).values()}) == len(weights(alone)) >= 2


def test_a_standing_crew_and_staleness_wire_the_same_plans(tmp_path, model):
    """With staleness 1 the second plan samples from the first's weights; a member is one process for all iterations."""
    url = str(tmp_path / "run")
    sections = {
        "algorithm": {"max_staleness": 1},
        "rollout": {"engine": "scripted", "crew": "standing"},
        "retention": {"keep_weights": 9, "compact": False},
    }
    assert run_local(training, config_file(tmp_path, model, url, **sections), count=3).iteration == 2
    store = connect(url)
    assert [read_plan(store, iteration).weight_version for iteration in range(3)] == [0, 0, 1]
    beats = [
        records.read(store, HeartbeatRecord, key) for each in range(3) for key in store.list(layout.alive_all(each))
    ]
    assert len({beat.pid for beat in beats}) == 2
    assert len(beats) > 2


def test_scorers_of_a_pool_score_each_iteration(tmp_path, model):
    url = str(tmp_path / "run")
    sections = {
        "rollout": {"engine": "scripted"},
        "teacher": {"path": str(model), "pool": "scorers"},
        "trainer": {"group_timeout_s": 120},
        "pools": ONE_SLOT | {"scoring": {"scorers": {"count": 2, "interruptible": True}}},
    }
    assert run_local(training, config_file(tmp_path, model, url, **sections), count=2).iteration == 1
    first, second = reports(connect(url))
    # The teacher is the policy that the run begins with.
    assert first.metrics["teacher/kl"] == pytest.approx(0, abs=1e-5)
    assert second.metrics["teacher/kl"] != 0


def test_a_failure_ends_the_run_with_its_members(tmp_path, model):
    """The plan has seen the reward; it stops at a response, so the train task fails while the crew generates."""
    url = str(tmp_path / "run")
    stops = [{"function": "tests.reward_functions:no_multiples_of_three", "on_failure": "stop"}]
    config = config_file(tmp_path, model, url, **KILLABLE, rewards=stops)
    with pytest.raises(RuntimeUserError, match="no_multiples_of_three") as raised:
        run_local(training, config, count=1)
    assert raised.value.code != "NonRecoverableError"
    assert reports(connect(url)) == []
