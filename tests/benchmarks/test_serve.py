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
