"""One iteration's training from hand-written journals: what is batched, recorded, replayed and refused."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.clock import ManualClock
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord
from storage.stores.memory import MemoryStore
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.grading.grader import Grader
from tasks.grading.reward import GradingError
from tasks.learning.journal_follower import GroupTimeout
from tasks.learning.learner import Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.trainer import IterationTrainer
from tests.covering import covering
from tests.graded_trainer import graded_trainer
from tests.journals import Incarnation, a_plan
from tests.property_examples import part_of_examples
from tests.tasks.learning.tiny_model import VOCABULARY

GROUPS, GENERATIONS = 5, 2
PLAN = a_plan(GROUPS, GENERATIONS, slots=2)
# A response is rewarded when it is as long as "worked" says: one of the group's lengths, so that most groups are mixed.
LENGTHS = {0: 3, 1: 5, 2: 9, 3: 2, 4: 4, 5: 4, 6: 7, 7: 1, 8: 2, 9: 6}
PROMPTS = [PromptRow(str(g), (1, 2, 3)[: 1 + g % 3], "p", {"worked": f"{LENGTHS[2 * g]}"}) for g in range(GROUPS)]
TOKENS_MAX = 40
EXACT = (RewardConfig(function="arithmetic"),)


class Killed(BaseException):
    """SIGKILL: nothing of the victim runs afterwards."""


def completion(response):
    rng = random.Random(response)
    return [rng.randrange(VOCABULARY) for _ in range(LENGTHS[response])]


def journal(store, order=range(GROUPS * GENERATIONS)):
    """Responses finish in `order`."""
    crew = [Incarnation(store, PLAN, slot, f"0000{slot}-a") for slot in range(2)]
    for response in order:
        crew[(response // GENERATIONS) % 2].write(response, completion(response))


@dataclass
class Training:
    """A trainer process: a policy of the same first weights, and what became of it."""

    learner: Learner
    trainer: IterationTrainer

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.learner.policy.tensors().items()}


@pytest.fixture
def start(build):
    """start(store, **settings) -> Training; the reward is 1 for completions as long as "worked" says."""
    graders = []

    def new(store, *, order="plan", rewards=EXACT, tokens_max=TOKENS_MAX, clock=None):
        policy = build()
        learner = Learner(policy, PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=1e-2)), None)
        graders.append(Grader(rewards))
        trainer = graded_trainer(
            store,
            PLAN,
            prompts=PROMPTS,
            learner=learner,
            grader=graders[-1],
            decode=lambda ids: str(len(ids)),
            algorithm=AlgorithmConfig(micro_batch_order=order),
            trainer=TrainerConfig(micro_batch_tokens_max=tokens_max, group_timeout_s=5.0),
            clock=clock or ManualClock(),
        )
        return Training(learner, trainer)

    yield new
    for grader in graders:
        grader.close()


def batches(store):
    """The recorded micro-batches, without their nonces."""
    found = [records.read(store, BatchRecord, key) for key in store.list(layout.batches(0))]
    return [(batch.number, batch.responses) for batch in found]


def groups_of(store):
    return [tuple(dict.fromkeys(r.response // GENERATIONS for r in responses)) for _, responses in batches(store)]


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def lengths_of_groups():
    return {
        g: [len(PROMPTS[g].token_ids) + LENGTHS[r] for r in range(g * GENERATIONS, (g + 1) * GENERATIONS)]
        for g in range(GROUPS)
    }


@pytest.fixture
def finished():
    store = MemoryStore()
    journal(store)
    return store


def test_a_step_trains_on_every_response_once_and_measures_it(finished, start):
    training = start(finished)
    before = training.weights()
    record = training.trainer.step()
    assert (record.iteration, record.weight_version, record.reward_errors) == (0, 1, ())
    trained = [graded for _, responses in batches(finished) for graded in responses]
    assert [graded.response for graded in trained] == list(range(GROUPS * GENERATIONS))
    assert [graded.length for graded in trained] == [LENGTHS[graded.response] for graded in trained]
    assert [graded.reward for graded in trained] == [1, 0, 1, 0, 1, 1, 1, 0, 1, 0]
    assert record.metrics["reward"] == 0.6
    assert record.metrics["num_tokens"] == sum(LENGTHS.values())
    assert record.metrics["timing_s/wait"] == record.metrics["timing_s/compute"] == 0
    assert record.metrics["actor/grad_norm"] > 0
    assert not same(training.weights(), before)


def test_micro_batches_are_recorded_before_they_are_used(start):
    """A trainer that cannot record a batch has not touched a gradient."""

    class ReadOnlyBatches(MemoryStore):
        def create(self, key, body):
            if "/batches/" in key:
                raise Killed
            return super().create(key, body)

    store = ReadOnlyBatches()
    journal(store)
    training = start(store)
    with pytest.raises(Killed):
        training.trainer.step()
    assert all(parameter.grad is None for parameter in training.learner.policy.parameters().values())


def divided(tokens_max):
    """Groups in plan order; a micro-batch is closed by the first that no longer fits."""
    lengths, batches = lengths_of_groups(), [[]]
    for group in range(GROUPS):
        together = [n for member in (*batches[-1], group) for n in lengths[member]]
        if batches[-1] and max(together) * len(together) > tokens_max:
            batches.append([])
        batches[-1].append(group)
    return [tuple(batch) for batch in batches]


@pytest.mark.slow
@settings(max_examples=part_of_examples(0.15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(GROUPS * GENERATIONS)), st.sampled_from([20, 40, 1000]))
def test_in_plan_order_neither_batches_nor_weights_depend_on_who_finished_first(start, order, tokens_max):
    shuffled, straight = MemoryStore(), MemoryStore()
    journal(shuffled, order)
    journal(straight)
    trainings = [start(store, tokens_max=tokens_max) for store in (shuffled, straight)]
    metrics = [training.trainer.step().metrics for training in trainings]
    assert groups_of(shuffled) == divided(tokens_max)
    assert metrics[0] == metrics[1]
    assert same(trainings[0].weights(), trainings[1].weights())


def test_in_plan_order_the_division_does_not_depend_on_what_is_finished_when_a_batch_is_closed(start):
    """The trainer looks at the journal between any two groups, and finds one more each time."""
    store = MemoryStore()
    crew = [Incarnation(store, PLAN, slot, f"0000{slot}-a") for slot in range(2)]
    left = list(range(GROUPS * GENERATIONS))

    class Meanwhile(ManualClock):
        def sleep(self, duration_s):
            super().sleep(duration_s)
            response = left.pop(0)
            crew[(response // GENERATIONS) % 2].write(response, completion(response))

    start(store, clock=Meanwhile()).trainer.step()
    assert groups_of(store) == divided(TOKENS_MAX)


def test_in_order_of_arrival_a_batch_takes_what_there_is_and_waits_for_nothing(start):
    store = MemoryStore()
    crew = [Incarnation(store, PLAN, slot, f"0000{slot}-a") for slot in range(2)]

    def finish(*groups):
        for response in [r for group in groups for r in range(group * GENERATIONS, (group + 1) * GENERATIONS)]:
            crew[(response // GENERATIONS) % 2].write(response, completion(response))

    events = [lambda: finish(3), lambda: finish(1, 0), lambda: finish(4, 2)]

    class Meanwhile(ManualClock):
        def sleep(self, duration_s):
            events.pop(0)()

    start(store, order="arrival", tokens_max=1000, clock=Meanwhile()).trainer.step()
    assert groups_of(store) == [(3,), (0, 1), (2, 4)]


def test_a_group_larger_than_the_limit_is_a_batch_of_its_own(finished, start):
    start(finished, tokens_max=1).trainer.step()
    assert groups_of(finished) == [(0,), (1,), (2,), (3,), (4,)]


class DiesAtWrite(MemoryStore):
    """Its client is killed at the k-th create of a batch, before or after that has had its effect."""

    def __init__(self, writes, takes_effect):
        super().__init__()
        self.left = writes
        self.takes_effect = takes_effect

    def create(self, key, body):
        if "/batches/" not in key:
            return super().create(key, body)
        self.left -= 1
        if self.left >= 0:
            return super().create(key, body)
        if self.takes_effect:
            super().create(key, body)
        self.left = 1 << 30
        raise Killed


@pytest.mark.slow
@pytest.mark.parametrize(("order", "takes_effect"), covering(["plan", "arrival"], [False, True], strength=1))
def test_killed_at_any_batch_it_replays_the_same_batches_to_the_same_weights(finished, start, order, takes_effect):
    undisturbed = start(finished, order=order)
    metrics = undisturbed.trainer.step().metrics
    number = len(batches(finished))
    assert number >= 3
    for writes in range(number):
        store = DiesAtWrite(writes, takes_effect)
        journal(store)
        with pytest.raises(Killed):
            start(store, order=order).trainer.step()
        assert len(batches(store)) == writes + takes_effect
        successor = start(store, order=order)
        assert successor.trainer.step().metrics == metrics
        assert batches(store) == batches(finished)
        assert same(successor.weights(), undisturbed.weights())


def test_what_was_recorded_in_order_of_arrival_is_replayed_although_more_has_arrived_since(start):
    store = DiesAtWrite(1, takes_effect=True)
    journal(store, order=[6, 7, 2, 3])
    with pytest.raises(Killed):
        start(store, order="arrival", tokens_max=24).trainer.step()
    assert groups_of(store) == [(1,), (3,)]
    rest = Incarnation(store, PLAN, 0, "00000-b"), Incarnation(store, PLAN, 1, "00001-b")
    for response in (0, 1, 4, 5, 8, 9):
        rest[(response // GENERATIONS) % 2].write(response, completion(response))
    start(store, order="arrival", tokens_max=24).trainer.step()
    assert groups_of(store)[:2] == [(1,), (3,)]
    assert sorted(group for batch in groups_of(store) for group in batch) == list(range(GROUPS))


def test_a_group_that_never_ends_is_named_and_the_weights_are_untouched(start):
    store = MemoryStore()
    journal(store, order=[0, 1, 2, 3, 4])
    training = start(store)
    before = training.weights()
    with pytest.raises(GroupTimeout, match=r"response 5 \(group 2\): 0 tokens, held by 00000-a"):
        training.trainer.step()
    assert same(training.weights(), before)


def test_groups_without_a_difference_in_reward_teach_nothing(start, finished, monkeypatch):
    for row in PROMPTS:
        monkeypatch.setitem(row.columns, "worked", "nobody is as long as this")
    training = start(finished)
    before = training.weights()
    record = training.trainer.step()
    assert record.metrics["reward"] == 0
    assert record.metrics["actor/grad_norm"] == 0
    assert same(training.weights(), before)


def test_one_group_without_a_difference_leaves_the_gradient_to_the_others(start):
    """Group 2 is rewarded twice; whatever its responses are, the gradient of the sum of losses is the others'."""
    norms = []
    for change in (0, 1):
        store = MemoryStore()
        crew = [Incarnation(store, PLAN, slot, f"0000{slot}-a") for slot in range(2)]
        for response in range(GROUPS * GENERATIONS):
            tokens = completion(response)
            if response // GENERATIONS == 2:
                tokens = [(token + change) % VOCABULARY for token in tokens]
            crew[(response // GENERATIONS) % 2].write(response, tokens)
        norms.append(start(store).trainer.step().metrics["actor/grad_norm"])
    assert norms[0] == norms[1] > 0


FAILING = RewardConfig(function="tests.reward_functions:no_multiples_of_three", on_failure=-2.0)


def test_a_reward_that_fails_is_recorded_with_its_response_and_counts_as_configured(finished, start):
    record = start(finished, rewards=(FAILING,)).trainer.step()
    failed = sorted(response for response, length in LENGTHS.items() if length % 3 == 0)
    assert [int(line.split("response ")[1].split()[0]) for line in record.reward_errors] == failed
    assert all("three is too many" in line for line in record.reward_errors)
    rewards = {graded.response: graded.reward for _, responses in batches(finished) for graded in responses}
    assert {response for response, reward in rewards.items() if reward == -2.0} == set(failed)


def test_failures_of_rewards_survive_a_kill(start):
    store = DiesAtWrite(1, takes_effect=True)
    journal(store)
    with pytest.raises(Killed):
        start(store, rewards=(FAILING,)).trainer.step()
    record = start(store, rewards=(FAILING,)).trainer.step()
    assert len(record.reward_errors) == sum(length % 3 == 0 for length in LENGTHS.values())


def test_a_reward_configured_to_stop_stops_before_anything_is_recorded_of_its_batch(finished, start):
    stopping = RewardConfig(function="tests.reward_functions:no_multiples_of_three", on_failure="stop")
    training = start(finished, rewards=(stopping,))
    before = training.weights()
    with pytest.raises(GradingError, match="response 0 raised RuntimeError: three is too many"):
        training.trainer.step()
    assert batches(finished) == []
    assert same(training.weights(), before)


def test_a_damaged_shard_is_named_and_never_trained_on(finished, start):
    key = layout.shard(0, "00001-a", 1)
    body = bytearray(finished.get(key))
    body[len(body) // 2] ^= 1
    finished.put(key, bytes(body))
    training = start(finished)
    before = training.weights()
    with pytest.raises(ValueError, match=rf"object '{key}' is corrupt"):
        training.trainer.step()
    assert same(training.weights(), before)


def test_a_shard_that_is_gone_is_noticed_by_a_replay(start):
    """Response 6 was trained on with 7 tokens in two shards; the second of them has vanished since."""
    store = MemoryStore()
    crew = [Incarnation(store, PLAN, slot, f"0000{slot}-a") for slot in range(2)]
    for response in (0, 1, 2, 3, 4, 5, 7, 6, 8, 9):
        tokens = completion(response)
        crew[(response // GENERATIONS) % 2].write(response, tokens[:1], Finish.RUNNING)
        crew[(response // GENERATIONS) % 2].write(response, tokens[1:])
    start(store).trainer.step()
    store.delete(layout.shard(0, "00001-a", 7))
    training = start(store)
    with pytest.raises(ValueError, match=r"00001-a/00000007\.arrow.*it is gone"):
        training.trainer.step()


def test_the_loser_of_a_race_for_a_batch_trains_on_the_winners(start):
    """Another trainer has seen more of the journal and records a batch that this one has not read yet."""

    class OthersComeFirst(MemoryStore):
        rival = None

        def create(self, key, body):
            if self.rival is not None and "/batches/000000" in key:
                rival, self.rival = self.rival, None
                rival()
            return super().create(key, body)

    store = OthersComeFirst()
    journal(store, order=[2, 3])
    rest = Incarnation(store, PLAN, 0, "00000-b"), Incarnation(store, PLAN, 1, "00001-b")

    def rival():
        for response in (0, 1, 4, 5, 6, 7, 8, 9):
            rest[(response // GENERATIONS) % 2].write(response, completion(response))
        start(store, order="arrival").trainer.step()

    store.rival = rival
    loser = start(store, order="arrival")
    loser.trainer.step()
    assert [graded.response for _, responses in batches(store) for graded in responses] == list(range(10))
