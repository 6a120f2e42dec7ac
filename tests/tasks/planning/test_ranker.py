"""The ranker learns an order from pairs, always the same one, and follows when it changes."""

import numpy as np

from storage.records.length_tables import empty_table
from storage.records.prompt_table import PromptRow
from tasks.planning.lengths import rank_correlation
from tasks.planning.prompt_features import PromptFeatures, prompt_features
from tasks.planning.ranker import scores, trained


def prompts_and_means(seed: int, size: int = 64, longer_token: int = 7) -> tuple[PromptFeatures, np.ndarray]:
    """Prompts of equal length whose responses are the longer, the more often a token is among 12."""
    rng = np.random.default_rng(seed)
    often = rng.integers(0, 5, size)
    rows = []
    for number, times in enumerate(often):
        ids = [longer_token] * times + rng.integers(100, 140, 12 - times).tolist()
        rows.append(PromptRow(f"{seed}/{number}", tuple(rng.permutation(ids).tolist()), "", {}))
    return prompt_features(rows), 50.0 + 40.0 * often + rng.normal(0, 10, size)


def after(seeds: range, longer_token: int = 7, start: tuple | None = None) -> tuple:
    state = start or (empty_table().weights, empty_table().squares)
    for seed in seeds:
        state = trained(*state, *prompts_and_means(seed, longer_token=longer_token))
    return state


def test_it_ranks_prompts_it_has_never_seen_by_their_tokens():
    prompts, means = prompts_and_means(99)
    assert rank_correlation(scores(empty_table().weights, prompts), means) == 0
    assert rank_correlation(scores(after(range(6))[0], prompts), means) > 0.8


def test_it_follows_when_another_token_makes_responses_long():
    prompts, means = prompts_and_means(99, longer_token=8)
    before = after(range(6))
    assert rank_correlation(scores(before[0], prompts), means) < 0.6
    assert rank_correlation(scores(after(range(6, 14), 8, before)[0], prompts), means) > 0.8


def test_it_is_the_same_every_time():
    first, second = after(range(3)), after(range(3))
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_only_the_order_counts():
    prompts, means = prompts_and_means(1)
    state = (empty_table().weights, empty_table().squares)
    assert np.array_equal(trained(*state, prompts, means)[0], trained(*state, prompts, np.exp(means / 50))[0])


def test_groups_that_are_all_alike_teach_nothing():
    prompts, means = prompts_and_means(1)
    table = empty_table()
    weights, _ = trained(table.weights, table.squares, prompts, np.full(len(means), 9.0))
    assert not weights.any()
    one = prompts.take(np.arange(len(means)) == 0)
    assert not trained(table.weights, table.squares, one, means[:1])[0].any()
