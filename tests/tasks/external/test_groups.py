"""A group as a trainer gets it, with the observations of a conversation marked."""

import numpy as np

from storage.journal.assembly import Assembled
from storage.journal.shard import Finish
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord, GradedResponse
from tasks.external.groups import groups_of
from tasks.external.prime_rl import _of_group
from tasks.external.rollouts import Rollouts
from tasks.external.trl import _completions, run_rewards
from tasks.external.verl import AgentLoopManager
from tests.external_program import settings
from tests.journals import a_plan
from tests.tasks.external.test_verl import verl_config

# Tokens by the policy, an observation, and tokens by the policy.
ORIGINS = (2, 3, 1)


class Reader:
    """The rows of a batch."""

    def tokens(self, graded):
        size = sum(ORIGINS)
        return Assembled(
            response=graded.response,
            token_ids=np.arange(size, dtype=np.uint32) + 10 * graded.response,
            logprobs=np.array([-0.5, -1.0, -1.5], np.float32),
            finish=Finish.STOP,
            lineage=(),
            span_tokens=(size,),
            weight_versions=np.array([4, 4, 5, 5, 5, 5], np.uint32),
            origins=ORIGINS,
            events=(),
            owes=False,
            restarts=0,
        )


def graded(response, reward=1.0):
    return GradedResponse(
        response=response,
        length=6,
        policy_length=3,
        finish_reason="failed" if reward is None else "stop",
        lineage=(),
        reward=reward,
        rewards={"even": reward},
    )


def test_observations_are_masked_and_filtered_groups_left_out():
    plan = a_plan(groups=3, generations=2, slots=1, iteration=7, weight_version=7)
    prompts = [PromptRow(f"p{k}", (1, k), f"{k}=", {"answer": k}) for k in range(3)]
    batch = BatchRecord(
        iteration=7,
        number=0,
        responses=(graded(5, None), graded(4), graded(0), graded(1)),
        filtered=(graded(2), graded(3)),
    )
    [first, third] = groups_of(batch, plan, prompts, Reader(), lambda ids: "".join(map(chr, ids)))
    assert [(each.step, each.number, each.columns) for each in (first, third)] == [
        (7, 0, {"answer": 0}),
        (7, 2, {"answer": 2}),
    ]
    assert [each.sample for each in third.responses] == [0, 1]
    [whole, failed] = third.responses
    assert whole.policy_mask.tolist() == [True, True, False, False, False, True]
    assert whole.token_ids.tolist() == [40, 41, 42, 43, 44, 45]
    assert whole.logprobs.tolist() == [-0.5, -1.0, -1.5]
    assert whole.weight_versions.tolist() == [4, 4, 5]
    assert whole.completion == "()*+,-"
    assert (failed.finish_reason, failed.reward) == ("failed", None)


def group_with_a_failure():
    plan = a_plan(groups=1, generations=3, slots=1, iteration=7, weight_version=7)
    responses = (graded(0, 1.0), graded(1, None), graded(2, 0.5))
    batch = BatchRecord(iteration=7, number=0, responses=responses, filtered=())
    [group] = groups_of(batch, plan, [PromptRow("p", (1, 2), "1=", {})], Reader(), str)
    return group


def test_a_failed_response_moves_no_advantage_of_its_group_and_is_not_trained(tmp_path, model):
    """Both trainers average rewards over all responses of a group."""
    group = group_with_a_failure()
    source = Rollouts(settings("memory://a-failure", model, data={"source": "submitted"}))
    arrays, _ = AgentLoopManager(verl_config(tmp_path), source)._padded([group])
    assert arrays["rm_scores"].sum(axis=1).tolist() == [1.0, 0.75, 0.5]
    assert [row.any() for row in arrays["response_mask"]] == [True, False, True]
    found = _completions([group])
    assert run_rewards([], **found) == [1.0, 0.75, 0.5]
    assert [any(row) for row in found["env_mask"]] == [True, False, True]
    trained = list(_of_group(group))
    assert [sample.advantage for sample in trained] == [0.25, 0.0, -0.25]
    assert [any(sample.mask) for sample in trained] == [True, False, True]
