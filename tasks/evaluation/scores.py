"""Scores of an evaluation: from graded responses to numbers. Pure functions.

Metrics begin with `val/`; pass@k and mean@n are named as in verl.
"""

from collections.abc import Sequence

import numpy as np

from storage.records.evaluation_records import EvaluatedPrompt
from storage.records.records import GradedResponse
from tasks.configuration.evaluation import SEED, EvaluationConfig
from tasks.evaluation.intervals import bootstrap_interval, interval, pass_at_k


def evaluated_prompts(
    graded: Sequence[GradedResponse], prompt_ids: Sequence[str], num_generations: int, pass_threshold: float
) -> list[EvaluatedPrompt]:
    """One entry for each prompt with a response that did not fail, in order.

    graded: every response of the evaluation, in any order.
    """
    ordered = sorted(graded, key=lambda response: response.response)
    groups = [
        [
            (response, response.reward)
            for response in ordered[first : first + num_generations]
            if response.reward is not None
        ]
        for first in range(0, len(ordered), num_generations)
    ]
    return [
        EvaluatedPrompt(
            prompt_id=prompt_id,
            graded=len(group),
            correct=sum(reward >= pass_threshold for _, reward in group),
            clipped=sum(response.finish_reason == "length" for response, _ in group),
            reward=float(np.mean([reward for _, reward in group])),
            length=float(np.mean([response.policy_length for response, _ in group])),
        )
        for prompt_id, group in zip(prompt_ids, groups, strict=True)
        if group
    ]


def score_metrics(
    prompts: Sequence[EvaluatedPrompt], graded: Sequence[GradedResponse], config: EvaluationConfig
) -> dict[str, float]:
    """Means over prompts with their 95 % intervals, and the mean length and share of clipped responses.

    pass@k is the unbiased estimate from the graded ones of n responses (see `pass_at_k`), mean@n their mean reward. A
    prompt with fewer than k graded responses has no pass@k.
    """
    n = config.num_generations
    graded = [response for response in graded if response.reward is not None]
    metrics: dict[str, float] = {}
    for k in config.k:
        values = [pass_at_k(prompt.graded, prompt.correct, k) for prompt in prompts if prompt.graded >= k]
        if not values:
            continue
        metrics |= _with_interval(f"val/pass@{k}", values, interval(values, SEED))
    rewards = [prompt.reward for prompt in prompts]
    spread = bootstrap_interval(rewards, SEED) if len(rewards) > 1 else None
    metrics |= _with_interval(f"val/reward/mean@{n}", rewards, spread)
    for name in graded[0].rewards:
        given = [value for response in graded if (value := response.rewards.get(name)) is not None]
        if given:
            metrics[f"val/rewards/{name}/mean@{n}"] = float(np.mean(given))
    return metrics | {
        "val/num_prompts": float(len(prompts)),
        "val/num_tokens": float(sum(response.policy_length for response in graded)),
        "val/completions/mean_length": float(np.mean([prompt.length for prompt in prompts])),
        "val/completions/clipped_ratio": sum(prompt.clipped for prompt in prompts) / len(graded),
    }


def _with_interval(name: str, values: Sequence[float], spread: tuple[float, float] | None) -> dict[str, float]:
    mean = {name: float(np.mean(values))}
    return mean if spread is None else {**mean, f"{name}/low": spread[0], f"{name}/high": spread[1]}
