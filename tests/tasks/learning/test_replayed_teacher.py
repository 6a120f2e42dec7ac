"""Stored groups of another run beside a teacher: scored as generated ones, corrected, and equal after any kill."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.journal.compaction import read_responses
from storage.records import layout
from storage.records.prompt_table import read_prompts
from storage.records.run import num_drawn, read_plan
from storage.records.teacher_scores import decode_scores
from storage.weights import tensor_sets
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.run_config import ConfigError, parse
from tasks.learning.pass_loss import PassLoss
from tests.dying_store import DiesAtWrite, Killed
from tests.small_run import (
    commit_iteration,
    document,
    everything,
    learned,
    memory_store,
    model_directory,
    plan_iteration,
    roll_out,
    train_small,
)

OTHER, URL = "memory://replayed-teacher-other", "memory://replayed-teacher"
GROUPS, SIZE, TEMPERATURE = 4, 3, 0.8
# Differs in nearly every group.
BY_TEXT = [{"function": "tests.reward_functions:characters", "weight": 0.1}]
REPLAY = {"runs": [f"{OTHER}@1:2"], "share": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


def settings(url, model, **sections):
    run = {"url": url, "seed": sections.pop("seed", 3), "num_prompts_per_step": GROUPS, "num_generations": SIZE}
    given = {
        "rollout": {"engine": "torch", "context_length": 240},
        "sampling": {"max_completion_length": 40, "temperature": TEMPERATURE},
        "trainer": {"micro_batch_tokens_max": 640},
    }
    return document(url, model, run=run, **given | sections)


def distilling(model, larger, top_k, **sections):
    """A run that learns from the teacher alone, with half of its groups from the other run."""
    data, teacher = {"source": "arithmetic", "limit": 10, "replay": REPLAY}, {"path": str(larger), "top_k": top_k}
    given = settings(URL, model, data=data, teacher=teacher, **sections)
    del given["rewards"]
    return parse(given)


@pytest.fixture(scope="module", params=[None, 4], ids=["sampled", "head"])
def rolled_out(request, model, larger):
    """All objects of a run with a teacher whose first rollout has ended; the other run is gone by then."""
    memory_store("replayed-teacher-other")
    for iteration in range(2):
        # After a step its policy is another.
        plan_iteration(parse(settings(OTHER, model, seed=8, rewards=BY_TEXT)))
        roll_out(OTHER, iteration)
        train_small(OTHER, iteration)
        commit_iteration(OTHER, iteration)
    store = memory_store("replayed-teacher")
    plan_iteration(distilling(model, larger, request.param))
    memory_store("replayed-teacher-other")
    roll_out(URL, 0)
    return everything(store)


@pytest.fixture(scope="module")
def undisturbed(rolled_out):
    store = memory_store("replayed-teacher", DiesAtWrite("replayed-teacher", rolled_out))
    store.metrics = learned(train_small(URL, 0).metrics)
    return store


def scores_of(store):
    """The stored scores, by key."""
    return {key: store.get(key) for key in store.list(layout.iteration(0)) if "/teacher/" in key}


def test_a_stored_response_is_scored_by_the_teacher_at_this_runs_temperature(undisturbed, larger):
    plan, bodies = read_plan(undisturbed, 0), scores_of(undisturbed)
    scores = {row.response: row for key, body in bodies.items() for row in decode_scores(key, body)}
    assert (num_drawn(plan), plan.num_groups) == (2, GROUPS)
    assert scores.keys() == set(range(GROUPS * SIZE))
    teacher, prompts = AutoModelForCausalLM.from_pretrained(larger).eval(), read_prompts(undisturbed, plan)
    for row in read_responses(undisturbed, 0):
        prompt, tokens = prompts[row.group].token_ids, row.token_ids.tolist()
        with torch.no_grad():
            logits = teacher(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / TEMPERATURE, dim=1)
        own, found = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0], scores[row.response]
        np.testing.assert_allclose(found.logprobs, own.numpy(), atol=1e-4)
        likeliest = logprobs.topk(found.head_ids.shape[1]).values.numpy()
        np.testing.assert_allclose(found.head_logprobs, likeliest, atol=1e-4)


def test_stored_groups_are_corrected_and_measured(undisturbed):
    assert abs(undisturbed.metrics["importance/weight_mean"] - 1) > 1e-4
    assert undisturbed.metrics["teacher/kl"] != 0
    assert undisturbed.metrics["actor/grad_norm"] > 0


def killed_at(writes, rolled_out, undisturbed):
    """A trainer is killed at a write, and the next attempt ends with the bits of the undisturbed one."""
    store = memory_store("replayed-teacher", DiesAtWrite("replayed-teacher", rolled_out, writes))
    with pytest.raises(Killed):
        train_small(URL, 0)
    store.left = 1 << 30
    assert learned(train_small(URL, 0).metrics) == undisturbed.metrics, writes
    assert scores_of(store) == scores_of(undisturbed)
    for prefix in (layout.weights(1), layout.checkpoint(1)):
        pair = [tensor_sets.read_manifest(each, prefix).tensors for each in (store, undisturbed)]
        assert pair[0] == pair[1], (writes, prefix)


def test_a_trainer_killed_before_or_after_the_scores_ends_with_the_same_bits(rolled_out, undisturbed):
    first = next(at for at, key in enumerate(undisturbed.written) if "/teacher/" in key)
    for writes in (first, first + 1):
        killed_at(writes, rolled_out, undisturbed)


@pytest.mark.slow
def test_a_trainer_killed_at_any_write_ends_with_the_same_bits(rolled_out, undisturbed):
    for writes in range(len(undisturbed.written)):
        killed_at(writes, rolled_out, undisturbed)


def gradient_at_the_teacher(old_logprobs):
    """Of the loss of sampled tokens, in expectation over another sampler, for a policy that equals the teacher."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64)
    teacher, sampler = (torch.log_softmax(each, dim=0) for each in (logits, logits + 0.05 * torch.randn(6)))
    algorithm = AlgorithmConfig(
        old_logprobs=old_logprobs, importance_sampling="token" if old_logprobs == "trainer" else "none"
    )
    loss = PassLoss(
        algorithm=algorithm,
        mode="token" if old_logprobs == "trainer" else None,
        weights=sampler.exp()[:, None],
        advantages=torch.zeros(6, dtype=torch.float64),
        response_mask=torch.ones(6, 1, dtype=torch.bool),
        sampler_logprobs=sampler[:, None],
        first_logprobs=None,
        reference_logprobs=None,
        teacher_logprobs=teacher[:, None],
        teacher_weight=1.0,
    )
    policy = logits.clone().requires_grad_()
    loss.weighted(torch.log_softmax(policy, dim=0)[:, None]).sum().backward()
    return policy.grad.abs().max().item()


def test_a_policy_that_equals_its_teacher_stays_only_by_its_own_log_prob():
    """The reason of the refusal: with the sampler's log-prob the policy would leave the teacher."""
    assert gradient_at_the_teacher("trainer") < 1e-12
    assert gradient_at_the_teacher("sampler") > 1e-4


def test_a_teacher_of_sampled_tokens_needs_the_policys_log_prob(model, larger):
    line = r"algorithm\.old_logprobs: value 'sampler'; allowed with data\.replay and a teacher without top_k: 'trainer'"
    with pytest.raises(ConfigError, match=line):
        distilling(model, larger, None, algorithm={"old_logprobs": "sampler"})
    assert distilling(model, larger, 4, algorithm={"old_logprobs": "sampler"}).teacher.top_k == 4
