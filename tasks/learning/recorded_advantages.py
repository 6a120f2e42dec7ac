"""The advantages of recorded responses, recomputed for display by the train step's own functions."""

from collections.abc import Sequence

import torch

from storage.records.records import GradedResponse, PlanRecord
from tasks.configuration.deleted_fields import ConstantDiffersError, without_deleted
from tasks.configuration.run_config import parse_held
from tasks.learning.advantage import advantages_of
from tasks.learning.estimates import counted, length_penalties, trained


def recorded_advantages(plan: PlanRecord, responses: Sequence[GradedResponse]) -> dict[int, float] | None:
    """The advantage of each response, by the response's number.

    responses: the responses of all micro-batches of the iteration, filtered groups excepted. Returns None without
    responses, for pairs, and for an estimator that gives a number per token, is the user's own, or needs values outside
    the records: the critic's values, the KL to the reference, or a teacher's log-probs. Returns None, too, for a run of
    another version whose deleted fields decide what is learned. Raises ValueError if the estimator raises ValueError.
    """
    try:
        document = without_deleted(plan.config)
    except ConstantDiffersError:
        return None
    config = parse_held(document)
    algorithm = config.algorithm
    # A user's own function would have to be imported, which a reader of a run must not do.
    unknown = (
        algorithm.estimator.is_own
        or algorithm.estimator.per_token
        or algorithm.estimator.needs_critic
        or algorithm.kl_in == "reward"
        or algorithm.learns_pairs
        or (config.teacher is not None and config.teacher.top_k is None)
    )
    if unknown or not responses:
        return None
    ordered = sorted(responses, key=lambda graded: graded.response)
    # What stands for the reward of a response that failed is not read.
    rewards = torch.tensor([graded.reward or 0.0 for graded in ordered], dtype=torch.float64)
    rewards = rewards + length_penalties(ordered, algorithm, plan.sampling)
    kept = {graded.response for graded in trained(ordered, algorithm, plan.num_generations)}
    lengths = torch.tensor([graded.policy_length if graded.response in kept else 0 for graded in ordered])
    given = torch.tensor(counted(ordered, plan.num_generations))
    rows, _ = advantages_of(rewards, lengths, plan.num_generations, algorithm, counted=given)
    return {graded.response: float(row) for graded, row in zip(ordered, rows, strict=True)}
