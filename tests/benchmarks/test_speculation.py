"""The benchmark of drafts: its clock, its comparisons, and a paced iteration: drafts shorten it, and change nothing."""

from dataclasses import replace

import pytest

from benchmarks import speculation
from benchmarks.draft_identity import RESPONSES, families, identical, requests_of
from benchmarks.draft_models import distil
from benchmarks.paced_drafts import STEP_S, PacedClock, paced_seconds, tail_requests
from examples.warm_start import WarmStart, warm_start
from storage.records.records import SamplingParams
from tasks.sampling.engines import torch_engine
from tests.wrong_verifications import WRONG_VERIFICATIONS


def test_a_paced_step_takes_the_seconds_of_the_curve():
    clock = PacedClock()
    for tokens, seconds in STEP_S:
        before_s = clock()
        clock.step(tokens)
        assert clock() - before_s == pytest.approx(seconds)
    clock.step(258)
    assert clock() - sum(seconds for _, seconds in STEP_S) == pytest.approx((10e-3 + 18e-3) / 2)


def test_processor_time_passes_on_the_clock_while_it_runs():
    clock = PacedClock()

    def work():
        return sum(range(300_000))

    work()
    assert clock() == 0.0
    assert clock.timed(work)() == work()
    once_s = clock()
    assert once_s > 1e-4
    clock.timed(lambda: [clock.timed(work, runs=False)() for _ in range(20)])()
    assert clock() < 3 * once_s, "inside, the clock stood"


def test_responses_are_identical_in_tokens_and_log_probs():
    wanted = {1: ([4, 5], [-1.0, -2.0]), 2: ([6], [-1.0])}
    assert identical(wanted, wanted) == 2
    assert identical({**wanted, 1: ([4, 6], [-1.0, -2.0])}, wanted) == 1
    assert identical({**wanted, 1: ([4, 5], [-1.0])}, wanted) == 1
    assert identical({**wanted, 2: ([6], [-1.1])}, wanted) == 1


def test_a_paced_iteration_with_right_drafts_is_shorter_and_the_same():
    requests = tail_requests(24, equal=False)
    plain_s, wanted = paced_seconds(requests, 4, None, 0.0)
    assert {response: len(tokens) for response, tokens in wanted.items()} == {
        request.response: request.sampling.max_completion_length for request in requests
    }
    drafted_s, found = paced_seconds(requests, 4, wanted, 0.9)
    assert found == wanted
    assert drafted_s < 0.7 * plain_s


@pytest.mark.slow
def test_the_families_comparison_has_turns_and_finds_wrong_verifications(tmp_path, monkeypatch):
    (first, second) = families(tmp_path, ["qwen2"], 64)
    assert first["identical"] == second["identical"] == first["of"] == 64
    assert first["turns answered"] > 64
    assert first["accepted"] > 200
    monkeypatch.setattr(torch_engine, "verified", WRONG_VERIFICATIONS[1])
    assert families(tmp_path, ["qwen2"], 64)[0]["identical"] < 64


@pytest.mark.slow
def test_an_equal_draft_model_is_always_right_and_a_distilled_one_nears_the_policy(tmp_path):
    policy, shares = tmp_path / "policy", {}
    warm_start(policy, replace(WarmStart(), steps=8, batch=16), lambda *_: None)
    short = SamplingParams(max_completion_length=32)
    requests = [replace(request, sampling=short) for request in speculation.requests_of(policy, 0, 1)]
    plain = speculation.decode(speculation.make_engine(policy, 8, None), requests)
    distil(policy, tmp_path / "untaught", 0)
    distil(policy, tmp_path / "distilled", 8)
    for folder in (policy, tmp_path / "untaught", tmp_path / "distilled"):
        table = speculation.steps_by_source(policy, folder, requests, {8: plain})
        assert all(row["identical"] == row["of"] == 8 for row in table)
        [shares[folder.name]] = [
            row["accepted"] for row in table if (row["source"], row["drafts"]) == ("draft model", 1)
        ]
    assert 1 == shares["policy"] > shares["distilled"] > shares["untaught"]


def test_there_are_256_responses_in_groups():
    requests = requests_of(RESPONSES)
    assert len({request.noise_key for request in requests}) == 256
    assert len({request.prompt_ids for request in requests}) == 32
