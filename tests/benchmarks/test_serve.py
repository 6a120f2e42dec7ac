"""`benchmarks.serve` in small: real processes, killed."""

import pytest

from benchmarks import serve
from benchmarks.serve import differences, measure
from tests.small_run import model_directory

pytestmark = pytest.mark.slow
ANSWER = b'{"id": "cmpl-a", "choices": [{"token_ids": [1, 2]}]}'


def test_each_request_is_answered_once_under_kills_with_the_tokens_of_an_undisturbed_run(tmp_path):
    targets = measure(tmp_path, model_directory(tmp_path / "model"), requests=20, kills=3)
    assert [target.name for target in targets if not target.met] == []
    assert {target.name: target.value for target in targets}["kills"] == 3


@pytest.mark.parametrize(("expected", "wrong"), [([[1, 2, 3]], 0), ([[1, 3, 3]], 1), ([], 1)])
def test_other_tokens_are_found(expected, wrong):
    assert differences({"k": ANSWER}, {"k": {"n": 1, "max_tokens": 2}}, {"a": expected}) == wrong


def test_requests_are_of_every_kind():
    asked = serve.bodies(20).values()
    assert {type(body["prompt"]) for body in asked} == {str, list}
    assert {body["n"] for body in asked} == {1, 2, 3}
    assert {body.get("max_tokens") for body in asked} == {5, None}


def test_the_waits_of_short_requests_beside_long_ones_are_measured():
    # Tokens, asked at, answered at: the second long one has ended when the last short one comes.
    answered = [(90, 0.0, 50.0), (80, 0.0, 9.0), (5, 1.0, 4.0), (6, 2.0, 9.0), (7, 60.0, 61.0), (8, 3.0, 4.0)]
    answered += [(40, 0.0, 30.0), (41, 0.0, 1.0)]
    assert serve.beside_long(answered) == 3.0
