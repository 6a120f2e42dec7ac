"""Groups without a difference in reward are replaced: what is recorded, trained, closed and reported, from journals."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.clock import ManualClock
from storage.journal.compaction import read_responses
from storage.journal.retention import sweep
from storage.journal.retention_config import RetentionConfig
from storage.journal.shard import Finish
from storage.records import layout, prompt_table, records
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord, ClosedRecord
from storage.records.run import exists, read_plan
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectMissing
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.grading.grader import Grader
from tasks.learning.learner import Learner
from tasks.learning.optimizer import PolicyOptimizer
from tests.covering import covering
from tests.graded_trainer import graded_trainer
from tests.journals import Incarnation, a_plan
from tests.property_examples import part_of_examples
from tests.small_run import (
    OWN_REWARD,
    commit_iteration,
    config,
    memory_store,
    model_directory,
    plan_iteration,
    train_small,
)
from tests.tasks.learning.tiny_model import VOCABULARY

GROUPS, GENERATIONS = 6, 2
LENGTHS = (3, 5, 9, 2, 4, 1, 7, 1, 2, 6, 5, 8)
EXACT = (RewardConfig(function="arithmetic"),)
FILTER = {"filter_groups": True}


class Killed(BaseException):
    """SIGKILL: nothing of the victim runs afterwards."""


class DiesAtCall(MemoryStore):
    """Holds copies of `objects`; its client is killed at the k-th call, before or after that has had its effect."""

    def __init__(self, objects, calls=1 << 30, *, takes_effect=False):
        super().__init__()
        self._objects.update(objects)
        self.left = calls
        self.takes_effect = takes_effect

    def _call(self, verb, *arguments):
        self.left -= 1
        if self.left == -1:
            if self.takes_effect:
                with suppress(ObjectMissing):
                    verb(*arguments)
            raise Killed
        return verb(*arguments)

    def get(self, key, start=0, end=None):
        return self._call(super().get, key, start, end)

    def list(self, prefix, after=""):
        return self._call(super().list, prefix, after)

    def create(self, key, body):
        return self._call(super().create, key, body)

    def put(self, key, body):
        return self._call(super().put, key, body)


def plan_of(wanted, groups=GROUPS, deciding=None):
    config = {"algorithm": {"filter_groups_reward": deciding}}
    return a_plan(groups, GENERATIONS, slots=2, groups_wanted=wanted, config=config)


def prompts_of(varied):
    """One member of a varied group is as long as "worked" says, and none of another group."""
    return [
        PromptRow(str(g), (1, 2, 3)[: 1 + g % 3], "p", {"worked": f"{LENGTHS[2 * g]}" if is_varied else "none"})
        for g, is_varied in enumerate(varied)
    ]


def completion(response):
    rng = random.Random(response)
    return [rng.randrange(VOCABULARY) for _ in range(LENGTHS[response])]


def journal(store, order=range(GROUPS * GENERATIONS)):
    """Responses finish in `order`."""
    crew = [Incarnation(store, plan_of(None), slot, f"0000{slot}-a") for slot in range(2)]
    for response in order:
        crew[(response // GENERATIONS) % 2].write(response, completion(response))
    return store


@pytest.fixture
def train(build):
    """train(store, varied, wanted, ...) -> (learner, TrainingRecord)."""

    def run(store, varied, wanted, *, tokens_max=40, rewards=EXACT, deciding=None, **algorithm):
        policy = build()
        learner = Learner(policy, PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=1e-2)), None)
        with Grader(rewards) as grader:
            record = graded_trainer(
                store,
                plan_of(wanted, deciding=deciding),
                prompts=prompts_of(varied),
                learner=learner,
                grader=grader,
                decode=lambda ids: str(len(ids)),
                algorithm=AlgorithmConfig(**FILTER, **algorithm),
                trainer=TrainerConfig(micro_batch_tokens_max=tokens_max, group_timeout_s=5.0),
                clock=ManualClock(),
            ).step()
        return learner, record

    return run


def batches(store):
    """The recorded micro-batches, without their nonces."""
    found = [records.read(store, BatchRecord, key) for key in store.list(layout.batches(0))]
    return [replace(batch, nonce="") for batch in found]


def groups_of(responses):
    numbers = [graded.response for graded in responses]
    groups = list(dict.fromkeys(number // GENERATIONS for number in numbers))
    assert numbers == [g * GENERATIONS + member for g in groups for member in range(GENERATIONS)]
    return groups


def division(store):
    return [(groups_of(batch.responses), groups_of(batch.filtered)) for batch in batches(store)]


def divided(varied, wanted, tokens_max):
    """In plan order; a micro-batch is closed by a group that no longer fits, and the last by the last group wanted."""
    lengths = [[1 + g % 3 + LENGTHS[2 * g], 1 + g % 3 + LENGTHS[2 * g + 1]] for g in range(GROUPS)]
    found, trained = [([], [])], 0
    for group in range(GROUPS):
        if trained == wanted:
            break
        together = [n for member in (*found[-1][0], group) for n in lengths[member]]
        if found[-1][0] and max(together) * len(together) > tokens_max:
            found.append(([], []))
        found[-1][0 if varied[group] else 1].append(group)
        trained += varied[group]
    return found


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def tensors(learner):
    return learner.policy.tensors()


VARIED = st.lists(st.booleans(), min_size=GROUPS, max_size=GROUPS)


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(VARIED, st.integers(1, GROUPS), st.permutations(range(GROUPS * GENERATIONS)), st.sampled_from([20, 40, 1000]))
def test_neither_batches_nor_weights_depend_on_who_finished_first(train, varied, wanted, order, tokens_max):
    shuffled, straight = journal(MemoryStore(), order), journal(MemoryStore())
    left, right = (train(store, varied, wanted, tokens_max=tokens_max) for store in (shuffled, straight))
    assert division(shuffled) == divided(varied, wanted, tokens_max)
    assert batches(shuffled) != []
    assert left[1].metrics == right[1].metrics
    assert same(tensors(left[0]), tensors(right[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "takes_effect"), covering(["grpo", "reinforce_plus_plus_baseline"], [False, True], strength=1)
)
def test_killed_at_any_call_it_ends_with_the_same_batches_and_weights(train, estimator, takes_effect):
    varied, wanted = (True, False, True, False, True, True), 3
    journalled = journal(MemoryStore())._objects
    store = DiesAtCall(journalled)
    learner, record = train(store, varied, wanted, tokens_max=20, advantage_estimator=estimator)
    calls = (1 << 30) - store.left
    assert calls > 20
    assert division(store) == divided(varied, wanted, 20)
    assert len(division(store)) == 3
    for call in range(calls):
        disturbed = DiesAtCall(journalled, call, takes_effect=takes_effect)
        with pytest.raises(Killed):
            train(disturbed, varied, wanted, tokens_max=20, advantage_estimator=estimator)
        disturbed.left = 1 << 30
        successor, again = train(disturbed, varied, wanted, tokens_max=20, advantage_estimator=estimator)
        assert again.metrics == record.metrics
        assert batches(disturbed) == batches(store)
        assert exists(disturbed, layout.closed(0))
        assert same(tensors(successor), tensors(learner))


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(VARIED, st.integers(1, GROUPS), st.integers(0, 60), st.booleans())
def test_killed_anywhere_the_division_is_the_same(train, varied, wanted, call, takes_effect):
    store = DiesAtCall(journal(MemoryStore())._objects, call, takes_effect=takes_effect)
    with suppress(Killed):
        train(store, varied, wanted)
    store.left = 1 << 30
    train(store, varied, wanted)
    assert division(store) == divided(varied, wanted, 40)


def test_nothing_is_waited_for_once_enough_groups_are_recorded_and_the_iteration_is_closed(train):
    """Groups 4 and 5 never end; group 1 is replaced by group 3."""
    store = journal(MemoryStore(), range(4 * GENERATIONS))
    train(store, (True, False, True, True, True, True), 3, tokens_max=1000)
    assert division(store) == [([0, 2, 3], [1])]
    closed = records.read(store, ClosedRecord, layout.closed(0))
    assert closed.reason == "as many groups as are wanted are in a recorded batch"


def test_filtered_groups_leave_no_trace_in_the_gradient(build, train):
    """The weights are those of an iteration that had the varied groups alone."""
    varied = (True, False, False, True, True, True)
    learner, record = train(journal(MemoryStore()), varied, 3, tokens_max=1000)
    kept = [0, 3, 4]
    plan, store = a_plan(len(kept), GENERATIONS, slots=1), MemoryStore()
    crew = Incarnation(store, plan, 0, "00000-a")
    for index, group in enumerate(kept):
        for member in range(GENERATIONS):
            crew.write(GENERATIONS * index + member, completion(GENERATIONS * group + member))
    policy = build()
    alone = Learner(policy, PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=1e-2)), None)
    with Grader(EXACT) as grader:
        metrics = (
            graded_trainer(
                store,
                plan,
                prompts=[prompts_of(varied)[group] for group in kept],
                learner=alone,
                grader=grader,
                decode=lambda ids: str(len(ids)),
                algorithm=AlgorithmConfig(),
                trainer=TrainerConfig(micro_batch_tokens_max=1000, group_timeout_s=5.0),
                clock=ManualClock(),
            )
            .step()
            .metrics
        )
    assert same(tensors(alone), tensors(learner))
    assert metrics["actor/grad_norm"] == record.metrics["actor/grad_norm"] > 0
    assert (metrics["reward"], record.metrics["reward"]) == (1 / 2, 3 / 10)  # filtering does not flatter the reward


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"num_mini_batches": 2}, {"advantage_estimator": "reinforce_plus_plus_baseline"}, {"mask_truncated": True}],
    ids=str,
)
def test_without_any_varied_group_no_step_is_taken(build, train, algorithm):
    store = journal(MemoryStore())
    learner, record = train(store, (False,) * GROUPS, 3, overlong_buffer_length=4, **algorithm)
    assert division(store) == [([], list(range(GROUPS)))]
    assert exists(store, layout.closed(0))
    assert record.metrics["actor/grad_norm"] == record.metrics["loss"] == record.metrics["num_tokens"] == 0
    assert record.metrics["reward"] == 0
    assert learner.optimizer.steps == 0
    assert same(tensors(learner), build().tensors())


def test_with_too_few_varied_groups_what_there_is_is_trained(train):
    store = journal(MemoryStore())
    learner, record = train(store, (False, True, False, False, False, False), 3)
    assert division(store) == [([1], [0]), ([], [2, 3, 4, 5])]  # in the second nothing is trained
    assert record.metrics["num_tokens"] == LENGTHS[2] + LENGTHS[3]
    assert record.metrics["actor/grad_norm"] > 0
    assert learner.optimizer.steps == 1


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_the_named_reward_decides_which_groups_are_filtered(train, weight):
    """Lengths differ in every group, so with their penalty no reward equals another."""
    penalty = RewardConfig(function="length", arguments={"free_tokens": 0, "scale_tokens": 100})
    rewards, varied = (
        (RewardConfig(function="arithmetic", weight=weight), penalty),
        (True, False, False, True, True, True),
    )
    store, plain = journal(MemoryStore()), journal(MemoryStore())
    train(store, varied, 3, tokens_max=1000, rewards=rewards, deciding="arithmetic")
    assert division(store) == divided(varied, 3, 1000)
    train(plain, varied, 3, tokens_max=1000, rewards=rewards)
    assert division(plain) == [([0, 1, 2], [])]


def test_errors_of_rewards_of_filtered_groups_are_kept(build):
    """A response of three tokens fails, and counts as its group's others do."""
    failing = RewardConfig(function="tests.reward_functions:no_multiples_of_three", on_failure=0.0)
    policy, store = build(), journal(MemoryStore())
    learner = Learner(policy, PolicyOptimizer(policy.parameters(), OptimizerConfig()), None)
    with Grader((failing,)) as grader:
        record = graded_trainer(
            store,
            plan_of(6),
            prompts=prompts_of((True,) * GROUPS),
            learner=learner,
            grader=grader,
            decode=lambda ids: str(len(ids)),
            algorithm=AlgorithmConfig(**FILTER),
            trainer=TrainerConfig(micro_batch_tokens_max=40, group_timeout_s=5.0),
            clock=ManualClock(),
        ).step()
    assert next(groups for _, groups in division(store)) == [0]
    assert "response 0 " in record.reward_errors[0]
    assert len(record.reward_errors) == sum(length % 3 == 0 for length in LENGTHS)


URL = "memory://dynamic"
# Of each planned group the lengths of its 3 responses; the reward is 1 for an even one.
WHOLE = ((2, 3, 4), (1, 3, 5), (4, 4, 3), (1, 2, 2), (2, 2, 4), (6, 1, 1), (3, 4, 5))


def roll_out(store, plan):
    """Groups 0 to 6 end; of group 7, in the hands of slot 1 when it is closed, two tokens are journalled."""
    crew = [Incarnation(store, plan, slot, f"0000{slot}-{'a' * 16}") for slot in range(2)]
    for group, lengths in enumerate(WHOLE):
        for member, length in enumerate(lengths):
            crew[group % 2].write(3 * group + member, [7] * (length - 1) + [2])
    crew[1].write(21, [7, 7], Finish.RUNNING)
    journalled = [sum(sum(WHOLE[group]) for group in range(slot, 7, 2)) for slot in range(2)]
    # Slot 1 had decoded 5 more tokens that it had not journalled yet.
    for slot, extra in enumerate((0, 2 + 5)):
        told = journalled[slot] + extra
        crew[slot].announce(started_at_s=1.0, updated_at_s=2.0, tokens_generated=told, gone=True)


@pytest.mark.slow
def test_from_plan_to_report_unused_prompts_are_drawn_again(tmp_path):
    store = memory_store("dynamic")
    settings = config(URL, model_directory(tmp_path / "model"), rewards=OWN_REWARD, algorithm=FILTER)
    plan_iteration(settings)
    plan = read_plan(store, 0)
    assert (plan.num_groups, plan.groups_wanted) == (8, 4)
    assert [slot.groups for slot in plan.slots] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    roll_out(store, plan)
    train_small(URL, 0)
    assert [groups_of_three(batch) for batch in batches(store)] == [([0, 2, 3, 5], [1, 4])]
    report = commit_iteration(URL, 0)
    assert report.next_prompt == 6
    assert len(report.rewards) == len(report.lengths) == 18
    assert sum(report.lengths) == report.metrics["num_tokens"] == sum(map(sum, WHOLE[:6]))
    assert report.metrics["reward"] == pytest.approx(10 / 18)
    assert report.metrics["frac_reward_zero_std"] == pytest.approx(2 / 6)
    named = {name: report.metrics[f"filter_groups/{name}"] for name in ("filtered", "missing", "unused_tokens")}
    assert named == {"filtered": 2.0, "missing": 0.0, "unused_tokens": 3 + 4 + 5 + 2 + 5}
    assert [life.tokens_unused for life in report.lives] == [12, 7]
    assert report.metrics["resume/tokens_regenerated"] == report.metrics["preempt/count"] == 0
    live = list(read_responses(store, 0))
    assert sweep(store, RetentionConfig()).problems == ()
    assert store.list(layout.journal(0)) == []
    compacted = list(read_responses(store, 0))
    assert [row.response for row in compacted] == list(range(18))
    assert all(a.equals(b) for a, b in zip(live, compacted, strict=True))
    assert [row.reward for row in compacted if row.group == 4] == [1.0, 1.0, 1.0]
    plan_iteration(settings)
    first, second = (prompts_in(store, iteration) for iteration in (0, 1))
    assert read_plan(store, 1).first_prompt == 6
    assert second[:2] == first[6:]


def groups_of_three(batch):
    return tuple(sorted({graded.response // 3 for graded in part}) for part in (batch.responses, batch.filtered))


def prompts_in(store, iteration):
    key = read_plan(store, iteration).prompts_key
    return [row.prompt_id for row in prompt_table.decode_prompts(key, store.get(key))]
