"""A group as a trainer gets it, with the observations of a conversation marked."""

import numpy as np

from storage.journal.assembly import Assembled
from storage.journal.shard import Finish
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord, GradedResponse
from tasks.external.groups import groups_of
from tests.journals import a_plan

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
