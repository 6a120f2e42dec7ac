"""The part of benchmarks.gpu about drafts, at its small size, and in Triton's interpreter with vLLM."""

from dataclasses import replace

import pytest

from benchmarks.gpu import speculation
from benchmarks.gpu.report import rows
from benchmarks.gpu.sizes import size_for
from tasks.sampling.engines.torch_engine import TorchEngine
from tests import vllm_interpreted
from tests.vllm_engines import MISSING, WHY_NOT
from tests.vllm_interpreted import INTERPRETED, run_interpreted

# vLLM and its libraries warn while they are imported.
pytestmark = pytest.mark.filterwarnings("default")
SMALL = size_for("cpu", "0.5b", small=True)


def measured(size, engine):
    found = {}
    for found in speculation.measure(size, (engine,)):
        assert found["steps"]
    return found


@pytest.mark.slow
def test_steps_and_speeds_of_the_torch_engine_and_every_response_as_without_drafts():
    found = measured(SMALL, "torch")
    steps = [(step["responses"], step["fed"]) for step in found["steps"]]
    assert steps == [(responses, fed) for responses in SMALL.speculation_batches for fed in (1, 3, 5, 9)]
    for step in found["steps"]:
        assert step["ms"] > 0
        # The drafts are wrong, so a step gives a token of each response, whatever it is fed.
        assert 1 <= step["tokens_drawn"] < 1.5
        assert step["over_1"] == 1 or step["fed"] > 1
    assert [(rate["source"], rate["text"]) for rate in found["rates"]] == [
        (source, text) for source in ("none", "siblings", "ngram", "draft_model") for text in ("new", "repeated")
    ]
    assert {rate["identical"] for rate in found["rates"]} == {1.0}
    assert all(rate["tokens_per_s"] > 0 for rate in found["rates"])
    assert all((rate["accepted"] is None) == (rate["source"] == "none") for rate in found["rates"])
    # The lower layers of the policy are not the policy, and not unlike it.
    assert all(0 < rate["accepted"] < 0.5 for rate in found["rates"] if rate["source"] == "draft_model")
    assert found["skipped"] == {}


@pytest.mark.slow
def test_an_engine_whose_drafts_change_tokens_is_seen(monkeypatch):
    class Changing(TorchEngine):
        def start(self, requests):
            shift = int(self._speculation is not None)
            super().start([replace(each, noise_key=each.noise_key + shift) for each in requests])

    monkeypatch.setattr(speculation, "TorchEngine", Changing)
    found = measured(SMALL, "torch")
    assert all((rate["identical"] < 0.5) == (rate["source"] != "none") for rate in found["rates"])


def test_the_table_names_steps_speeds_and_what_was_skipped():
    figures = {
        "steps": [{"model": "7b", "responses": 64, "fed": 5, "ms": 12.0, "over_1": 1.5, "tokens_drawn": 1.0}],
        "rates": [
            {
                "model": "0.5b",
                "engine": "vllm",
                "source": "siblings",
                "text": "repeated",
                "responses": 16,
                "tokens_per_s": 900.0,
                "accepted": 0.5,
                "identical": 0.75,
            }
        ],
        "skipped": {"vllm, ngram": "runner V1"},
    }
    assert rows({"speculation": figures}) == [
        {"measure": "step 7b, 64 responses, 5 tokens each, ms", "value": 12.0, "of 1 token": 1.5},
        {
            "measure": "vllm 0.5b, 16 responses, repeated text, drafts by siblings, tokens/s",
            "value": 900.0,
            "identical": 0.75,
            "accepted": 0.5,
        },
        {"measure": "drafts vllm, ngram", "value": "skipped: runner V1"},
    ]


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
@pytest.mark.skipif(vllm_interpreted.MISSING, reason=vllm_interpreted.WHY_NOT)
@pytest.mark.exhaustive
def test_with_vllm_in_tritons_interpreter(tmp_path):
    run_interpreted(__file__, tmp_path, 1200, "-k", "sources_of_vllm")


@pytest.mark.skipif(MISSING, reason=WHY_NOT)
@pytest.mark.skipif(not INTERPRETED, reason="runs in the child process of another test")
def test_the_sources_of_vllm_are_measured():
    found = measured(replace(SMALL, speculation_tokens=12, speculation_batches=(1,)), "vllm")
    assert found["skipped"] == {}
    assert {rate["source"] for rate in found["rates"]} == {"none", "siblings", "ngram", "draft_model"}
    assert {rate["identical"] for rate in found["rates"]} == {1.0}
