"""What the trainer learns by each algorithm, against gradients written out by hand, and that a kill changes nothing."""

import math
import random
import statistics

import pytest
import torch

from storage.clock import ManualClock
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord, SamplingParams
from storage.stores.memory import MemoryStore
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.grading.grader import Grader
from tasks.learning.batching import collate
from tasks.learning.learner import Learner
from tasks.learning.optimizer import PolicyOptimizer
from tests.covering import covering
from tests.graded_trainer import graded_trainer
from tests.journals import LOGPROB, Incarnation, a_plan
from tests.tasks.learning.tiny_model import VOCABULARY

GROUPS, GENERATIONS, LIMIT = 4, 3, 9
COUNT = GROUPS * GENERATIONS
PLAN = a_plan(GROUPS, GENERATIONS, slots=2, sampling=SamplingParams(max_completion_length=LIMIT))
LENGTHS = (3, 9, 5, 1, 2, 9, 4, 4, 9, 8, 6, 7)
PROMPTS = [PromptRow(str(g), (1, 2, 3)[: 1 + g % 3], "p", {}) for g in range(GROUPS)]
# As even_length gives them, worked out by the tests themselves.
REWARDS = tuple(1.0 if length % 2 == 0 else 0.0 for length in LENGTHS)
EPS = 1e-6
EVEN = (RewardConfig(function="tests.reward_functions:even_length"),)


class Killed(BaseException):
    """SIGKILL: nothing of the victim runs afterwards."""


class DiesAtBatch(MemoryStore):
    """Its client is killed once it has recorded `batches` batches."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def create(self, key, body):
        created = super().create(key, body)
        if "/batches/" in key:
            self.left -= 1
            if self.left == 0:
                raise Killed
        return created


def completion(response):
    rng = random.Random(response)
    return [rng.randrange(VOCABULARY) for _ in range(LENGTHS[response])]


def truncated(response):
    return LENGTHS[response] == LIMIT


def journal(store, *, all_truncated=False):
    """All responses, of which those as long as the limit were cut by it."""
    crew = [Incarnation(store, PLAN, slot, f"0000{slot}-a") for slot in range(2)]
    for response in range(COUNT):
        finish = Finish.LENGTH if truncated(response) or all_truncated else Finish.STOP
        crew[(response // GENERATIONS) % 2].write(response, completion(response), finish)
    return store


def batches(store):
    found = [records.read(store, BatchRecord, key) for key in store.list(layout.batches(0))]
    return [(batch.number, batch.responses) for batch in found]


@pytest.fixture
def learners():
    """All that were trained, or were about to be."""
    return []


@pytest.fixture(scope="module")
def grader():
    with Grader(EVEN) as grader:
        yield grader


@pytest.fixture
def train(build, learners, grader):
    """train(store, algorithm, ...) -> (learner, metrics) of a float64 policy and of its slightly other reference."""

    def run(store, algorithm, *, tokens_max=40):
        policy = build(double=True)
        reference = other(build) if algorithm.kl_coef > 0 else None
        optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9))
        learners.append(Learner(policy, optimizer, reference))
        record = graded_trainer(
            store,
            PLAN,
            prompts=PROMPTS,
            learner=learners[-1],
            grader=grader,
            decode=lambda ids: "x" * len(ids),
            algorithm=algorithm,
            trainer=TrainerConfig(micro_batch_tokens_max=tokens_max, group_timeout_s=5.0),
            clock=ManualClock(),
        ).step()
        return learners[-1], record.metrics

    return run


def other(build):
    """A reference policy that is not the policy."""
    reference = build(trainable=False, double=True)
    with torch.no_grad():
        for parameter in reference.parameters().values():
            parameter.mul_(1.1)
    return reference


def everything():
    """All responses as one batch."""
    prompts = [list(PROMPTS[response // GENERATIONS].token_ids) for response in range(COUNT)]
    tokens = [completion(response) for response in range(COUNT)]
    return collate(range(COUNT), prompts, tokens, [[LOGPROB] * len(row) for row in tokens])


def rows(build):
    """Log-probs of each response's tokens, and the k1 KL to the reference, as lists of lists."""
    batch = everything()
    with torch.no_grad():
        logprobs = build(double=True).logprobs(batch, 1.0)[0]
        difference = logprobs - other(build).logprobs(batch, 1.0)[0]
    return tuple([row[:n].tolist() for row, n in zip(each, LENGTHS, strict=True)] for each in (logprobs, difference))


def groups_of(values):
    return [values[start : start + GENERATIONS] for start in range(0, COUNT, GENERATIONS)]


def per_token(values):
    return [[value] * length for value, length in zip(values, LENGTHS, strict=True)]


def by_group(values):
    """GRPO, divided by the group's standard deviation."""
    found = []
    for group in groups_of(values):
        found += [(v - statistics.mean(group)) / (statistics.stdev(group) + EPS) for v in group]
    return found


def leave_one_out(values):
    return [v - (sum(group) - v) / (GENERATIONS - 1) for group in groups_of(values) for v in group]


def centred(values):
    return [v - sum(group) / GENERATIONS for group in groups_of(values) for v in group]


def normal(tokens):
    """Lists of numbers per response, normalised over all of them."""
    flat = [value for row in tokens for value in row]
    return [[(v - statistics.mean(flat)) / (statistics.stdev(flat) + EPS) for v in row] for row in tokens]


def discounted(token_rewards, gamma):
    returns = []
    for row in token_rewards:
        following, reversed_row = 0.0, []
        for reward in reversed(row):
            following = reward + gamma * following
            reversed_row.append(following)
        returns.append(reversed_row[::-1])
    return returns


def at_the_end(values):
    return [[0.0] * (n - 1) + [value] for value, n in zip(values, LENGTHS, strict=True)]


def minus_kl(values, kl, coef):
    return [value - coef * sum(row) for value, row in zip(values, kl, strict=True)]


PENALISED = [reward - min(1, max(0, length - 5) / 4) for reward, length in zip(REWARDS, LENGTHS, strict=True)]
RPP, BASELINE = "reinforce_plus_plus", "reinforce_plus_plus_baseline"
KL = {"kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1"}

# name: (algorithm, the factors before the gradients of the tokens' log-probs, given log-probs and KL).
CASES = {
    "grpo": ({}, lambda _, __: per_token(by_group(REWARDS))),
    "own": ({"advantage_estimator": "tests.own_estimators:mean_baseline"}, lambda _, __: per_token(centred(REWARDS))),
    "rloo": ({"advantage_estimator": "rloo"}, lambda _, __: per_token(leave_one_out(REWARDS))),
    "batch": (
        {"scale_rewards": "batch"},
        lambda _, __: per_token([v / (statistics.stdev(REWARDS) + EPS) for v in centred(REWARDS)]),
    ),
    BASELINE: ({"advantage_estimator": BASELINE}, lambda _, __: normal(per_token(centred(REWARDS)))),
    RPP: (
        {"advantage_estimator": RPP, "gamma": 0.9},
        lambda _, __: normal(discounted(at_the_end(REWARDS), 0.9)),
    ),
    "overlong": (
        {"overlong_buffer_length": 4},
        lambda _, __: per_token(by_group(PENALISED)),
    ),
    "token weights": (
        {"importance_sampling": "token", "importance_sampling_cap": 1.0},
        lambda logprobs, _: [
            [advantage * min(1.0, math.exp(value - LOGPROB)) for value in row]
            for advantage, row in zip(by_group(REWARDS), logprobs, strict=True)
        ],
    ),
    "rloo with the KL in the reward": (
        {"advantage_estimator": "rloo", **KL},
        lambda _, kl: per_token(leave_one_out(minus_kl(REWARDS, kl, 0.1))),
    ),
    f"{RPP} with the KL in the reward": (
        {"advantage_estimator": RPP, **KL},
        lambda _, kl: normal(
            discounted(
                [
                    [a - 0.1 * b for a, b in zip(row, penalty, strict=True)]
                    for row, penalty in zip(at_the_end(REWARDS), kl, strict=True)
                ],
                1.0,
            )
        ),
    ),
}


def gradient(build, factors, responses=range(COUNT)):
    """Of minus the sum of factor * log-prob over some responses, divided by their number of tokens."""
    policy, batch = build(double=True), everything()
    logprobs, _ = policy.logprobs(batch, 1.0)
    loss = sum((logprobs[r, : LENGTHS[r]] * torch.tensor(factors[r]).double()).sum() for r in responses)
    (-loss / sum(LENGTHS[r] for r in responses)).backward()
    return {name: parameter.grad for name, parameter in policy.parameters().items()}


def learned(learner):
    """The gradient of the only step, from the first moment."""
    moments = dict(learner.optimizer.each_moment())
    return {name: moments[f"exp_avg.{name}"] / 0.1 for name in learner.policy.parameters()}


def assert_close(actual, expected):
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    assert scale > 1e-3
    for name, tensor in expected.items():
        # Advantages are rounded to float32.
        torch.testing.assert_close(actual[name].double(), tensor, rtol=0, atol=1e-6 * scale)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens_max"), covering(CASES, [1, 40, 1000], strength=1))
def test_the_gradient_is_the_one_written_out_however_the_step_is_divided(train, build, name, tokens_max):
    fields, factors = CASES[name]
    store = journal(MemoryStore())
    learner, _ = train(store, AlgorithmConfig(**fields), tokens_max=tokens_max)
    assert (len(batches(store)) == 1) == (tokens_max == 1000)
    assert_close(learned(learner), gradient(build, factors(*rows(build))))


def test_the_factors_of_all_algorithms_differ(build):
    """So that no test above would pass with another algorithm's gradient."""
    given = rows(build)
    found = [[value for row in factors(*given) for value in row] for _, factors in CASES.values()]
    for index, left in enumerate(found):
        for right in found[:index]:
            assert max(abs(a - b) for a, b in zip(left, right, strict=True)) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "order"), covering(CASES, ["plan", "arrival"], strength=1))
def test_killed_at_any_batch_it_ends_with_the_same_bits(train, name, order):
    algorithm = AlgorithmConfig(micro_batch_order=order, **CASES[name][0])
    store = journal(MemoryStore())
    undisturbed, metrics = train(store, algorithm)
    number = len(batches(store))
    assert number >= 2
    for recorded in range(1, number + 1):
        disturbed = journal(DiesAtBatch(recorded))
        with pytest.raises(Killed):
            train(disturbed, algorithm)
        assert len(batches(disturbed)) == recorded
        successor, again = train(disturbed, algorithm)
        assert again == metrics
        assert batches(disturbed) == batches(store)
        assert same(successor.policy.tensors(), undisturbed.policy.tensors())


WHOLE = {RPP, BASELINE, "batch", f"{RPP} with the KL in the reward"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_estimators_of_the_whole_step_train_nothing_before_the_last_batch_is_recorded(train, learners, name):
    algorithm, store = AlgorithmConfig(**CASES[name][0]), journal(MemoryStore())
    train(store, algorithm)
    with pytest.raises(Killed):
        train(journal(DiesAtBatch(len(batches(store)))), algorithm)
    untouched = [parameter.grad is None for parameter in learners[-1].policy.parameters().values()]
    assert all(untouched) == any(untouched) == (name in WHOLE)


@pytest.mark.slow
def test_the_penalty_of_long_responses_is_measured_and_rewards_stay_as_graded(train):
    store = journal(MemoryStore())
    _, metrics = train(store, AlgorithmConfig(**CASES["overlong"][0]))
    assert metrics["reward"] == pytest.approx(sum(REWARDS) / COUNT)
    assert metrics["overlong_penalty"] == pytest.approx((sum(PENALISED) - sum(REWARDS)) / COUNT)
    assert [graded.reward for _, responses in batches(store) for graded in responses] == list(REWARDS)
    assert "overlong_penalty" not in train(journal(MemoryStore()), AlgorithmConfig())[1]


TRAINED = [response for response in range(COUNT) if not truncated(response)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens_max"),
    covering(["grpo", BASELINE, RPP, "rloo with the KL in the reward"], [1, 40, 1000], strength=1),
)
def test_truncated_responses_count_in_their_group_and_not_in_the_loss(train, build, name, tokens_max):
    """Normalisation over tokens is over those that are trained."""
    kl = rows(build)[1]
    left = [[0.0] * length for length in LENGTHS]
    factors = {
        "grpo": per_token(by_group(REWARDS)),
        "rloo with the KL in the reward": per_token(leave_one_out(minus_kl(REWARDS, kl, 0.1))),
        BASELINE: per_token(centred(REWARDS)),
        RPP: discounted(at_the_end(REWARDS), 0.9),
    }[name]
    if name in (BASELINE, RPP):
        for response, row in zip(TRAINED, normal([factors[response] for response in TRAINED]), strict=True):
            left[response] = row
        factors = left
    algorithm = AlgorithmConfig(**CASES[name][0], mask_truncated=True)
    learner, metrics = train(journal(MemoryStore()), algorithm, tokens_max=tokens_max)
    assert metrics["num_tokens"] == sum(LENGTHS[response] for response in TRAINED) < sum(LENGTHS)
    assert_close(learned(learner), gradient(build, factors, TRAINED))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", BASELINE, RPP])
def test_with_truncated_responses_alone_no_step_is_taken(train, build, name):
    store = journal(MemoryStore(), all_truncated=True)
    learner, metrics = train(store, AlgorithmConfig(**CASES[name][0], mask_truncated=True))
    assert metrics["actor/grad_norm"] == metrics["loss"] == metrics["num_tokens"] == 0
    assert metrics["reward"] == pytest.approx(sum(REWARDS) / COUNT)
    assert learner.optimizer.steps == 0
    assert same(learner.policy.tensors(), build(double=True).tensors())


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["rloo", RPP])
def test_the_kl_in_the_reward_is_measured_over_the_trained_tokens(train, build, estimator):
    kl = rows(build)[1]
    for fields, responses in (({}, range(COUNT)), ({"mask_truncated": True}, TRAINED)):
        algorithm = AlgorithmConfig(advantage_estimator=estimator, **KL, **fields)
        _, metrics = train(journal(MemoryStore()), algorithm)
        expected = sum(sum(kl[r]) for r in responses) / sum(LENGTHS[r] for r in responses)
        assert metrics["kl"] == pytest.approx(expected, rel=1e-9)
        assert abs(expected) > 1e-3


def test_with_the_samplers_log_probs_the_kl_in_the_reward_is_the_samplers(train, build):
    logprobs, kl = rows(build)
    shifted = [LOGPROB - (a - b) for one, two in zip(logprobs, kl, strict=True) for a, b in zip(one, two, strict=True)]
    algorithm = AlgorithmConfig(advantage_estimator="rloo", old_logprobs="sampler", **KL)
    _, metrics = train(journal(MemoryStore()), algorithm)
    assert metrics["kl"] == pytest.approx(sum(shifted) / len(shifted), rel=1e-9)


def test_the_kl_in_the_reward_needs_a_reference(train, monkeypatch):
    monkeypatch.setattr(f"{__name__}.other", lambda _: None)
    with pytest.raises(ValueError, match="kl_in: value 'reward'; allowed: 'loss' without a reference policy"):
        train(journal(MemoryStore()), AlgorithmConfig(**KL))
