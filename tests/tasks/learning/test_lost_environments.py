"""Steps in which few responses, or none, kept their environments: training goes on, and recorded batches replay."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from storage.clock import ManualClock
from storage.journal.shard import Finish, Row, encode_shard
from storage.records import layout, records
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord
from storage.stores.memory import MemoryStore
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.grading.grader import Grader
from tasks.learning.critic import Critic
from tasks.learning.learner import CriticLearner, Learner
from tasks.learning.optimizer import PolicyOptimizer
from tests.graded_trainer import graded_trainer
from tests.journals import LOGPROB, Incarnation, a_plan
from tests.turn_journals import NAME, answered, turn

GROUPS, GENERATIONS = 4, 3
PLAN = a_plan(GROUPS, GENERATIONS, config={"turns": {"environment": "tests.turn_journals:Nothing"}})
PROMPTS = [PromptRow(str(group), (1, 2), [{"role": "user", "content": "look"}], {}) for group in range(GROUPS)]
RATES = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9)
# How many responses of each group keep their environments.
LONELY, HALF = (1, 0, 1, 1), (1, 0, 3, 3)


def journal(store, survivors):
    """Each response says two tokens; the first ones of a group get rewards of their own, and the others are lost."""
    Incarnation(store, PLAN, 0, NAME)
    rows = []
    for response in range(GROUPS * GENERATIONS):
        logprobs = np.full(2, LOGPROB, dtype=np.float32)
        rows.append(Row(response, 1, 0, np.array([5, 6], dtype=np.uint32), logprobs, 0, Finish.ACTING))
        if response % GENERATIONS < survivors[response // GENERATIONS]:
            rows.append(answered(response, 2, [], turn(0, reward=float(response)), Finish.STOP))
        else:
            rows.append(answered(response, 2, [], turn(0, failure="it died"), Finish.FAILED))
    store.put(layout.shard(0, NAME, 0), encode_shard(rows))
    return store


def train(store, learner, algorithm, *, graded=True):
    with Grader((RewardConfig(function="environment"),)) if graded else nullcontext() as grader:
        return graded_trainer(
            store,
            PLAN,
            prompts=PROMPTS,
            learner=learner,
            grader=grader,
            decode=str,
            read_messages=lambda prompt, *_: (prompt.prompt, [{"role": "assistant", "content": "5 6"}]),
            algorithm=algorithm,
            trainer=TrainerConfig(micro_batch_tokens_max=12, group_timeout_s=5.0),
            clock=ManualClock(),
        ).step()


@pytest.fixture
def learner(build):
    def new(critic=None):
        policy = build()
        return Learner(policy, PolicyOptimizer(policy.parameters(), RATES), None, critic)

    return new


def is_as_built(policy, build):
    before = build().tensors(torch.float32)
    return all(torch.equal(tensor, before[name]) for name, tensor in policy.tensors(torch.float32).items())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_mini_batches": 2},
        {"num_epochs": 2, "num_mini_batches": 4},
        {"scale_rewards": "batch"},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"loss_agg_mode": "seq-mean-token-mean", "num_mini_batches": 3},
    ],
    ids=str,
)
def test_a_step_in_which_no_group_has_two_survivors_trains_nothing_and_replays(build, learner, settings):
    store, algorithm = journal(MemoryStore("run"), LONELY), AlgorithmConfig(**settings)
    first, again = learner(), learner()
    record = train(store, first, algorithm)
    assert record.metrics["num_tokens"] == record.metrics["loss"] == record.metrics["actor/grad_norm"] == 0.0
    assert record.metrics["reward"] == (0 + 6 + 9) / 3
    assert first.optimizer.steps == 0
    assert is_as_built(first.policy, build)
    recorded = store.list(layout.batches(0))
    replayed = train(store, again, algorithm)
    assert store.list(layout.batches(0)) == recorded
    assert {name: value for name, value in replayed.metrics.items() if "timing" not in name} == {
        name: value for name, value in record.metrics.items() if "timing" not in name
    }


@pytest.mark.parametrize("count", [2, 4])
def test_a_mini_batch_without_two_survivors_does_not_keep_the_others_from_being_trained(build, learner, count):
    """Groups 2 and 3 are trained: as one step of two, or as the last two steps of four."""
    found = learner()
    record = train(journal(MemoryStore("run"), HALF), found, AlgorithmConfig(num_mini_batches=count))
    assert found.optimizer.steps == count // 2
    assert record.metrics["num_tokens"] == 2 * GENERATIONS * 2
    assert record.metrics["actor/grad_norm"] > 0.0
    assert not is_as_built(found.policy, build)


def test_a_critic_without_a_trained_response_takes_no_step(model, learner):
    critic = Critic.of_policy(*model, TrainerConfig(device="cpu"))
    values = CriticLearner(critic, PolicyOptimizer(critic.parameters(), RATES), 0)
    algorithm = AlgorithmConfig(advantage_estimator="gae", num_mini_batches=2)
    record = train(journal(MemoryStore("run"), LONELY), learner(values), algorithm)
    assert (values.optimizer.steps, record.metrics["num_tokens"]) == (0, 0.0)


def test_without_rewards_lost_responses_are_recorded_as_failed_and_the_others_with_a_reward_of_0(learner):
    store = journal(MemoryStore("run"), HALF)
    record = train(store, learner(), AlgorithmConfig(), graded=False)
    assert record.metrics["reward"] == 0
    batches = [records.read(store, BatchRecord, key) for key in store.list(layout.batches(0))]
    found = {each.response: (each.finish_reason, each.reward) for batch in batches for each in batch.responses}
    survives = [number % GENERATIONS < HALF[number // GENERATIONS] for number in range(GROUPS * GENERATIONS)]
    assert found == {number: ("stop", 0.0) if kept else ("failed", None) for number, kept in enumerate(survives)}
