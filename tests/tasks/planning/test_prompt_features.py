import numpy as np
import pytest

from storage.records.length_tables import HASHED
from storage.records.prompt_table import PromptRow
from tasks.planning.prompt_features import answer_characters, prompt_features


def a_row(prompt_id: str = "p", token_ids: tuple[int, ...] = (1, 2, 3), **columns) -> PromptRow:
    return PromptRow(prompt_id, token_ids, "text", columns)


@pytest.mark.parametrize(
    ("columns", "characters"),
    [
        ({}, 0),
        ({"answer": "72", "solution": "x" * 30}, 30),
        ({"Answer": "abc"}, 3),
        ({"reward_model": {"ground_truth": "12345"}, "extra_info": {"answer": "1 + 2 = 3", "index": 4}}, 9),
        ({"answer": 42, "question": "long text that is no answer"}, 0),
    ],
)
def test_the_longest_text_that_is_an_answer_counts(columns, characters):
    assert answer_characters(columns) == characters


def test_rows_are_of_norm_one_and_follow_the_prompts():
    features = prompt_features([a_row("a", (5, 6, 5, 6)), a_row("b", (7,), answer="xyz"), a_row("c", ())])
    assert features.dense == pytest.approx(np.array([[1, np.log(5), 0, 0], [1, np.log(2), 1, np.log(4)], [1, 0, 0, 0]]))
    assert np.bincount(features.rows, features.values**2, 3) == pytest.approx([1, 1, 0])
    assert features.buckets.min() >= 0
    assert features.buckets.max() < HASHED
    # Tokens 5 and 6, the pairs 5 6 (twice) and 6 5.
    assert np.bincount(features.rows, minlength=3).tolist() == [4, 1, 0]


def test_a_pair_does_not_reach_over_two_prompts():
    alone = prompt_features([a_row("a", (5, 6))])
    both = prompt_features([a_row("a", (5, 6)), a_row("b", (7, 8))])
    assert both.buckets[both.rows == 0].tolist() == alone.buckets.tolist()


def test_a_prompt_is_known_by_its_id():
    digests = prompt_features([a_row("a"), a_row("b"), a_row("a", (9,))]).digests
    assert digests[0] == digests[2] != digests[1]


def test_take_is_as_if_only_these_had_been_given():
    rows = [a_row(str(k), tuple(range(k, k + 4)), answer="x" * k) for k in range(5)]
    kept = np.array([True, False, False, True, True])
    taken = prompt_features(rows).take(kept)
    alone = prompt_features([row for row, keep in zip(rows, kept, strict=True) if keep])
    for name in ("digests", "dense", "rows", "buckets", "values"):
        assert np.array_equal(getattr(taken, name), getattr(alone, name)), name


def test_no_prompt_has_no_features():
    assert len(prompt_features([])) == 0
