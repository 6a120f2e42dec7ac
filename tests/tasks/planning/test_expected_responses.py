"""The responses that stand for all: as long, as many, with as much in common, and dealt as the planner deals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tasks.planning.expected_responses import DECODED_MAX, ExpectedResponses
from tasks.planning.makespan import member_time_s
from tests.planning_requests import CURVE, a_part, a_request, concluded, some_lengths

MEMBERS = a_part(count=2, responses_max=4096)


def seen(*lengths: np.ndarray, predictor: str = "none") -> ExpectedResponses:
    """What is expected after iterations with these lengths."""
    known = replace(some_lengths(len(lengths[0])), predictor=predictor)
    num_generations = lengths[0].shape[1]
    past = tuple(concluded(each) for each in lengths)
    return ExpectedResponses(replace(a_request(lengths=known, past=past), num_generations=num_generations))


def random_lengths(groups: int, size: int, seed: int, common: float = 0.5) -> np.ndarray:
    generator = np.random.default_rng(seed)
    group, own = generator.standard_normal((groups, 1)), generator.standard_normal((groups, size))
    return 1000.0 * np.exp(math.sqrt(common) * group + math.sqrt(1 - common) * own)


def test_of_one_iteration_they_are_its_responses_with_its_groups():
    lengths = random_lengths(8, 4, seed=0)
    found = seen(lengths)
    assert found.weight == 1.0
    for group in found.lengths:
        assert np.isclose(np.sort(lengths, axis=1), np.sort(group)).all(axis=1).sum() == 1
    assert sorted(found.queue) == pytest.approx(sorted(lengths.ravel()))


def test_of_several_iterations_they_are_means_of_order_statistics():
    several = [random_lengths(16, 8, seed) for seed in range(6)]
    found = seen(*several)
    means = np.mean([np.sort(each, axis=None) for each in several], axis=0)
    assert np.sort(found.lengths, axis=None) == pytest.approx(means)

    # What a group has in common is kept: groups differ far more than if responses were dealt at random.
    def between(values: np.ndarray) -> float:
        return float(np.log(values).mean(axis=1).var())

    assert between(found.lengths) == pytest.approx(np.mean([between(each) for each in several]), rel=0.25)
    assert between(found.lengths) > 2 * between(np.random.default_rng(1).permuted(found.lengths.ravel()).reshape(16, 8))


@pytest.mark.parametrize(("groups", "size"), [(512, 16), (17, 32), (100, 16), (5, 256), (1, 600), (1, 2000)])
def test_many_are_decoded_by_few_with_as_many_tokens_and_the_longest_of_them(groups, size):
    lengths = random_lengths(groups, size, seed=3)
    found = seen(lengths)
    assert found.lengths.size <= max(DECODED_MAX, size)
    assert found.lengths.size * found.weight == pytest.approx(lengths.size)
    assert found.lengths.sum() * found.weight == pytest.approx(lengths.sum())
    assert found.lengths.max() == pytest.approx(lengths.max(), rel=0.1)
    assert np.median(found.lengths) == pytest.approx(np.median(lengths), rel=0.1)


def test_the_longest_groups_begin_first_only_if_lengths_are_known():
    lengths = np.sort(random_lengths(16, 4, seed=4), axis=0)
    unknown, known = seen(lengths), seen(lengths, predictor="history")
    assert unknown.queue == unknown.lengths.ravel().tolist()
    tokens = np.array(known.queue).reshape(16, 4).sum(axis=1)
    assert (np.diff(tokens) <= 1e-9).all()
    assert known.lengths.ravel()[known.order].tolist() == known.queue
    # Training does not care.
    assert known.lengths == pytest.approx(unknown.lengths)


def test_unevenness_is_what_the_last_member_takes_longer():
    """Of groups dealt in turn, the second member has the long ones."""
    lengths = np.full((16, 4), 100.0)
    lengths[1::2] = 900.0
    evenly_s = member_time_s([900.0] * 16 + [100.0] * 16, CURVE, 4096)
    last_s = member_time_s([900.0] * 32, CURVE, 4096)
    assert seen(lengths).unevenness([MEMBERS]) == pytest.approx(last_s / evenly_s, rel=1e-3)
    assert seen(lengths, predictor="history").unevenness([MEMBERS]) == pytest.approx(1.0, abs=1e-3)


def test_nobody_is_fuller_where_some_wait_or_one_has_all():
    lengths = random_lengths(16, 4, seed=5)
    found = seen(lengths)
    assert found.unevenness([MEMBERS]) > 1.0
    assert found.unevenness([replace(MEMBERS, count=1)]) == 1.0
    assert found.unevenness([replace(MEMBERS, responses_max=31)]) == 1.0
    # Two parts of one member are two members.
    one = replace(MEMBERS, count=1)
    assert found.unevenness([one, replace(one)]) == found.unevenness([MEMBERS])
