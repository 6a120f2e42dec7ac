import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import identity, iteration
from benchmarks.gpu.__main__ import _ENDING_MINUTES, main
from benchmarks.gpu.engine_arm import journalling_costs
from benchmarks.gpu.frontend import Decoded, arms, decoded
from benchmarks.gpu.noise import SAMPLERS, agreement, random_logits
from benchmarks.gpu.part import PARTS, Outcome, measure, run_part
from benchmarks.gpu.report import decode_share, rows, targets, taxes
from benchmarks.gpu.schedule import turns
from benchmarks.gpu.sizes import SHAPES, size_for
from benchmarks.gpu.trainer import completion_lengths
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.engines.torch_engine import TorchEngine

ROOT = Path(__file__).parents[2]
SMALL = size_for("cpu", "0.5b", small=True)
FIGURES = {
    "noise": {
        "batches": [
            {
                "batch": 4,
                "step_us": {"keyed": 30.0, "exponential": 20.0, "products": 90.0},
                "call_us": {"keyed": 31.0, "exponential": 21.0, "products": 91.0},
                "keyed_share": 0.25,
                "fused": False,
                "tokens_equal_to_cpu": 1.0,
                "logprob_difference_max": 1e-6,
            },
            {
                "batch": 8,
                "step_us": {"keyed": 30.0, "exponential": 40.0, "products": 90.0},
                "call_us": {"keyed": 31.0, "exponential": 41.0, "products": 91.0},
                "keyed_share": 0.25,
                "fused": True,
                "tokens_equal_to_cpu": 0.5,
                "logprob_difference_max": 1e-3,
            },
        ]
    },
    "engines": {
        "engines": 5,
        "starts": [
            {
                "model": "0.5b",
                "engine": "ours",
                "start_s": 60.0,
                "load_s": 1.0,
                "first_token_s": 3.0,
                "phases": {"import": 8.0},
            }
        ],
        "rates": [
            {"model": model, "engine": engine, "responses": 8, "tokens_per_s": rate}
            for model, engine, rate in (
                ("0.5b", "bare", 2000.0),
                ("0.5b", "ours", 1800.0),
                ("0.5b", "invariant", 1200.0),
                ("7b", "ours", 500.0),
            )
        ],
        "skipped": {"0.5b torch": "no such decoder"},
        "warnings": ["no such kernels"],
    },
    "taxes": {
        "engines": 2,
        "rates": [
            {"model": "0.5b", "engine": engine, "responses": 8, "tokens_per_s": rate}
            for engine, rate in (("ours", 1600.0), ("unkeyed", 1800.0))
        ],
        "journalling_tax_percent": 0.5,
        "session_seconds": 0.2,
    },
    "identity": {
        "arms": [
            {"kind": kind, "head_width": 128, "batch": 64, "resumed_identical": share, "as_in_smallest_batch": 1.0}
            for kind, share in (("torch", 0.5), ("vllm", 0.75))
        ]
    },
    "start": {
        name: {"start_s": seconds, "load_s": 2.0, "first_token_s": 3.0, "phases": {"graphs": 9.0}}
        for name, seconds in (("cold", 90.0), ("warm", 20.0))
    },
    "head": {"chosen": 1 << 27, "arms": [{"hidden": 2048, "us_per_token": {"16777216": 16.5}, "fastest": 16777216}]},
    "handover": {
        "arms": {
            "whole, copied to /dev/shm": {"skipped": "1.0 GB are free"},
            "changed in place": {"seconds": 0.5},
        }
    },
    "frontend": {
        "responses": 256,
        "arms": [
            {"interval": 1, "tokens_per_s": 20_000.0, "cpu_us_per_token": 45.0, "busy": 0.9, "same_tokens": 1.0},
            {"interval": 4, "tokens_per_s": 24_000.0, "cpu_us_per_token": 36.0, "busy": 0.864, "same_tokens": 0.5},
        ],
    },
    "iteration": {"engine": "vllm", "iterations": {"undisturbed": {"plan, s": 1.0}}, "gpu_busy_share": 0.75},
    "trainer": {
        "arms": [
            {
                "trainer": trainer,
                "packed": packed,
                "padded_share": 0.0,
                "liger": False,
                "gradient_checkpointing": False,
                "step_s": step_s,
                "tokens_per_s": 5000 / step_s,
                "peak_memory_bytes": peak << 30,
                "mfu": 0.4,
                "shared_tokens": 0,
            }
            for trainer, packed, step_s, peak in (
                ("ours", True, 1.0, 3),
                ("ours", False, 2.0, 5),
                ("trl", None, 1.6, 4),
            )
        ]
        + [
            {
                "trainer": "ours",
                "packed": True,
                "padded_share": 0.4,
                "liger": True,
                "gradient_checkpointing": True,
                "out_of_memory": "CUDA out of memory",
            }
        ]
    },
}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_small_run_ends_with_the_figures_of_its_parts_and_the_reason_of_what_was_skipped():
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--device", "cpu", "--json"]
    parts = [f"--part={part}" for part in ("noise", "trainer", "frontend")]
    ended = subprocess.run([*command, *parts], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    summary = json.loads(lines[-1])
    assert (summary["benchmark"], summary["targets"], summary["failed"]) == ("gpu", {}, {})
    assert summary["conditions"]["model"] == "small"
    # Each figure stands there once, before the line of its part, in the order of what is not known.
    assert {line for line in lines if line.startswith("## noise: keyed noise tax %")}
    assert len({line for line in lines if line.startswith("## ")}) == sum(line.startswith("## ") for line in lines)
    ended = [json.loads(line) for line in lines[:-1] if line.startswith("{")]
    assert [each["part"] for each in ended] == ["trainer", "frontend", "noise"]
    assert ended[0]["figures"] == summary["trainer"]
    minutes = sum(PARTS[part].minutes for part in ("trainer", "frontend", "noise"))
    assert lines[0] == f"{minutes:.1f} minutes; a part ends at the latest after:"
    assert summary["noise"]["vocab_size"] == SMALL.shape.vocab_size
    assert [batch["batch"] for batch in summary["noise"]["batches"]] == list(SMALL.batches)
    assert summary["noise"]["warnings"] == summary["trainer"]["warnings"] == []
    for batch in summary["noise"]["batches"]:
        assert set(batch["step_us"]) == set(batch["call_us"]) == {*SAMPLERS, "products"}
        assert min(*batch["step_us"].values(), *batch["call_us"].values()) > 0
        assert (batch["tokens_equal_to_cpu"], batch["logprob_difference_max"]) == (1.0, 0.0)
    arms = [arm for arm in summary["trainer"]["arms"] if arm["trainer"] == "ours"]
    assert [(arm["padded_share"], arm["packed"]) for arm in arms] == [
        (0.4, True),
        (0.4, False),
        (0.0, True),
        (0.0, False),
        (0.0, True),
        (0.0, True),
    ]
    assert [arm["gradient_checkpointing"] for arm in arms] == [False] * 5 + [True]
    assert [arm["shared_tokens"] for arm in arms] == [42, 0, 42, 0, 0, 42]
    for arm in arms:
        tokens = 8 * 8 + sum(completion_lengths(8, 8, 24, arm["padded_share"]))
        assert arm["tokens_per_s"] == pytest.approx(tokens / arm["step_s"])
        flops = 6 * summary["trainer"]["parameters"] * (tokens - arm["shared_tokens"])
        assert arm["model_flops_per_s"] == pytest.approx(flops / arm["step_s"])
        assert arm["peak_memory_bytes"] is None
        assert (arm["padding_share"] > 0) == (arm["padded_share"] > 0 and not arm["packed"])
    # Norms and biases are not in `weights`.
    assert summary["trainer"]["parameters"] == pytest.approx(SMALL.shape.weights, rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_full_size_is_skipped_and_not_begun_on_the_cpu():
    found = measure(PARTS["noise"], size_for("cuda", "0.5b", small=False))
    assert found == Outcome("skipped", {}, "PyTorch sees no GPU; --device cpu --small tries the code without one")


def test_full_size_on_a_cpu_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--device cpu: the full size is for a GPU; allowed: with --small" in capsys.readouterr().err


@pytest.mark.slow
def test_part_that_takes_too_long_or_breaks_down_has_failed_and_says_why():
    late = run_part("noise", SMALL, "0.5b", 0.01)
    assert late == Outcome("failed", {}, "not done after 0.01 s: it printed nothing")
    broken = run_part("noise", SMALL, "no such model", 60.0)
    assert broken.status == "failed"
    assert broken.reason.startswith("exit status 2: ")
    assert "no such model" in broken.reason


def test_what_is_not_known_fits_into_ten_minutes():
    planned = [turn.part for turn in turns(10 - _ENDING_MINUTES, {name: part.minutes for name, part in PARTS.items()})]
    assert planned[:5] == ["engines", "trainer", "handover", "start", "iteration"]
    assert max(part.minutes for part in PARTS.values()) <= 8
    assert sum(part.minutes for part in PARTS.values()) <= 45


@pytest.mark.slow
@pytest.mark.parametrize("module", [identity, pytest.param(iteration, marks=pytest.mark.exhaustive)])
def test_small_parts_measure_what_they_say(module):
    # vLLM in this process would disturb other tests that have it there.
    found = module.measure(SMALL, ("torch",)) if module is identity else module.measure(SMALL)
    if module is iteration:
        *_, found = found
    if module is identity:
        arms = found["arms"]
        assert [(arm["head_width"], arm["batch"]) for arm in arms] == [(64, 1), (64, 4), (32, 1), (32, 4)]
        assert {(arm["resumed_identical"], arm["as_in_smallest_batch"]) for arm in arms} == {(1.0, 1.0)}
        assert all(arm["tokens"] == 8 * SMALL.identity_tokens for arm in arms)
    else:
        assert list(found["iterations"]) == ["with starts", "undisturbed", "a member killed"]
        for metrics in found["iterations"].values():
            assert list(metrics)[:3] == ["plan, s", "train, s", "conclude, s"]
            assert metrics["num_tokens"] > 8 * 2 * 100
        assert found["iterations"]["a member killed"]["killed"]


@pytest.mark.slow
def test_the_front_end_is_measured_with_each_interval_or_skipped_without_vllm():
    outcome = run_part("frontend", SMALL, "0.5b", 180.0)
    if importlib.util.find_spec("vllm") is None:
        assert outcome == Outcome("skipped", {}, "vllm is not installed")
        return
    assert outcome.status == "measured", outcome.reason
    every, fourth = outcome.figures["arms"]
    assert (every["interval"], fourth["interval"]) == (1, 4)
    for arm in (every, fourth):
        # Tokens per second and seconds per token belong to the same decodings.
        assert arm["cpu_us_per_token"] * arm["tokens_per_s"] / 1e6 == pytest.approx(arm["busy"], rel=0.5)
        assert arm["same_tokens"] == 1.0
    # The first token alone, then four at a time; an interval that vLLM does not see would give about 1.
    assert fourth["tokens_per_delta"] >= SMALL.frontend_tokens / (1 + (SMALL.frontend_tokens - 1) / 4)


@pytest.mark.slow
def test_a_new_version_is_measured_in_each_way_or_skipped_without_vllm():
    outcome = run_part("handover", SMALL, "0.5b", 240.0)
    if importlib.util.find_spec("vllm") is None:
        assert outcome == Outcome("skipped", {}, "vllm is not installed")
        return
    assert outcome.status == "measured", outcome.reason
    arms = outcome.figures["arms"]
    assert min(arms[f"whole, {way}"]["seconds"] for way in ("copied to /dev/shm", "mapped from the cache")) > 0
    # The CPU build packs its weights.
    assert arms["changed in place"] == {"skipped": "this engine loads every version whole"}
    assert outcome.figures["changed_bytes"] == pytest.approx(0.06 * outcome.figures["bytes"], rel=0.1)


def test_what_is_handed_out_is_counted():
    engine = ScriptedEngine(vocab_size=100, max_responses_in_flight=3)
    engine.load_weights(0, {})
    found = decoded(engine, 3, 5)
    assert found.deltas == 15
    assert {response: len(tokens) for response, tokens in found.token_ids.items()} == {0: 5, 1: 5, 2: 5}
    assert found.us_per_token > 0
    assert found.cpu_us_per_token > 0


def test_intervals_are_compared_by_hand():
    every = [Decoded(40.0, 30.0, 4, {0: (1, 2), 1: (3, 4)}), Decoded(50.0, 40.0, 4, {0: (1, 2), 1: (3, 4)})]
    fourth = [Decoded(20.0, 15.0, 2, {0: (1, 2), 1: (3, 5)}), Decoded(50.0, 20.0, 2, {0: (1, 2), 1: (3, 5)})]
    first, second = arms({1: every, 4: fourth})
    assert (first["tokens_per_s"], first["cpu_us_per_token"], first["busy"]) == (1e6 / 45, 35.0, (0.75 + 0.8) / 2)
    assert (first["tokens_per_delta"], second["tokens_per_delta"]) == (1.0, 2.0)
    assert (first["same_tokens"], second["same_tokens"]) == (1.0, 0.5)
    assert second["cpu_over_first"] == {"median": 0.5, "interval": (0.5, 0.5)}
    assert second["time_over_first"] == {"median": 0.75, "interval": (0.5, 1.0)}


@pytest.mark.slow
def test_an_engine_that_forgets_its_noise_when_it_resumes_is_seen(monkeypatch):
    """The bug that the part is for: the noise of a resumed response begins at position 0 again."""

    def forgetful(requests):
        return [replace(each, noise_key=each.noise_key + len(each.generated_ids)) for each in requests]

    class Forgetful(TorchEngine):
        def start(self, requests):
            super().start(forgetful(requests))

    monkeypatch.setattr(identity, "TorchEngine", Forgetful)
    small = replace(SMALL, head_widths=(64,), identity_batches=(4,))
    [arm] = identity.measure(small, ("torch",))["arms"]
    assert arm["resumed_identical"] < 0.5


def test_all_samplers_return_tokens_with_their_log_probs():
    logits = random_logits(16, 500, "cpu")
    logprobs = torch.log_softmax(logits.values.float(), dim=-1)
    drawn = {name: sampler(logits) for name, sampler in SAMPLERS.items()}
    for token_ids, found in drawn.values():
        assert torch.equal(found, logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1))
    assert torch.equal(drawn["keyed"][0], drawn["keyed_unfused"][0])
    assert not torch.equal(drawn["keyed"][0], drawn["exponential"][0])
    assert agreement(logits) == {"tokens_equal_to_cpu": 1.0, "logprob_difference_max": 0.0}


def test_shapes_have_the_weights_of_the_models_they_are_named_after():
    # Qwen2.5's own figures, which count norms and biases, too: 494,032,768 and 1,543,714,304.
    assert SHAPES["0.5b"].weights == pytest.approx(494_032_768, rel=1e-3)
    # Qwen3-1.7B's figure, and Qwen2.5-7B's without its head, which is tied here.
    assert SHAPES["1.7b"].weights == pytest.approx(1_720_574_976, rel=1e-3)
    assert SHAPES["7b"].weights == pytest.approx(7_615_616_512 - 152_064 * 3584, rel=1e-3)
    assert SHAPES["1.5b"].weights == pytest.approx(1_543_714_304, rel=1e-3)


def test_journalling_is_what_many_tokens_take_longer_and_a_session_s_own_seconds_are_apart():
    few, many = SMALL.journal_tokens
    durations_s = {}
    for tokens in (few, many):
        durations_s[f"bare {tokens}"] = 0.1 + 0.02 * tokens
        durations_s[f"journalled {tokens}"] = 0.1 + 0.3 + 0.021 * tokens
    found = journalling_costs(durations_s, SMALL)
    assert found["journalling_tax_percent"] == pytest.approx(5.0)
    assert found["session_seconds"] == pytest.approx(0.3)
    assert found["journalled_tokens_per_s"] == pytest.approx(SMALL.responses / 0.021)


def test_taxes_and_shares_worked_out_by_hand():
    assert taxes(FIGURES) == {
        "keyed noise": pytest.approx(-25.0),
        "keyed sampling": pytest.approx(12.5),
        "journalling": 0.5,
    }
    # 8 tokens take 8 / 1800 s on vLLM, of which 30 us are noise.
    assert decode_share(FIGURES) == pytest.approx(30e-6 / (8 / 1800))
    assert (taxes({}), decode_share({})) == ({}, None)


def test_targets_are_of_what_was_measured():
    assert {target.name: target.met for target in targets(FIGURES)} == {
        "keyed_tokens_equal_to_cpu": False,
        "keyed_logprob_difference_to_cpu": False,
        "keyed_noise_tax_percent": True,
        "keyed_sampling_tax_percent": False,
        "journalling_tax_percent": True,
        "engine_over_bare_vllm_0.5b_8": False,
        "trainer_over_trl_padded_0": True,
        "trainer_memory_over_trl": True,
        "vllm_start_warm_s": True,
        "vllm_start_cold_s": False,
        "iteration_gpu_busy_share": False,
        "resumed_responses_identical_on_vllm": False,
    }
    ours_alone = {"arms": [arm for arm in FIGURES["trainer"]["arms"] if arm["trainer"] == "ours"]}
    assert targets({"trainer": ours_alone}) == []


def test_table_shows_every_part_and_what_did_not_fit():
    table = {row["measure"]: row for row in rows(FIGURES)}
    assert table["ours 0.5b, 8 responses, tokens/s"]["of bare vLLM"] == 0.9
    assert table["ours 7b, 8 responses, tokens/s"]["value"] == 500.0
    assert table["engine 0.5b torch"]["value"] == "skipped: no such decoder"
    assert table["ours 0.5b, beside 4 others, start: import, s"]["value"] == 8.0
    broken = "trainer ours packed, Liger, gradient checkpointing, padded share 0.4"
    assert table[broken]["value"] == "out of memory: CUDA out of memory"
    assert table["trainer ours padded, padded share 0, tokens/s"]["peak GiB"] == 5.0
    over = table["trainer over TRL's fastest, padded share 0"]
    assert (over["speed"], over["memory"]) == (1.6, 0.75)
    assert table["keyed noise fused, batch 4"]["value"] is False
    assert table["engines warns"]["value"] == "no such kernels"
    assert table["vLLM 0.5b, 8 responses, usual kernels over batch-invariant ones"]["value"] == 1.5
    assert table["vllm, heads of 128, batch 64, resumed responses identical"]["value"] == 0.75
    assert (table["vLLM, cold, start, s"]["value"], table["vLLM, warm, start, s"]["value"]) == (90.0, 20.0)
    assert table["vLLM, warm, start: graphs, s"]["value"] == 9.0
    assert table["head of 2048, 2^24 logits a chunk, us per token"] == {
        "measure": "head of 2048, 2^24 logits a chunk, us per token",
        "value": 16.5,
        "fastest": "fastest",
    }
    assert table["a new version of weights, changed in place, s"]["value"] == 0.5
    assert table["a new version of weights, whole, copied to /dev/shm, s"]["value"] == "1.0 GB are free"
    assert table["front end, 256 in flight, tokens every 4, tokens/s"]["value"] == 24_000.0
    assert table["front end, 256 in flight, tokens every 1, its processor time, us per token"]["value"] == 45.0
    assert table["front end, 256 in flight, tokens every 1, share of a core"]["value"] == 0.9
    assert table["iteration on vllm, undisturbed, plan, s"]["value"] == 1.0
    assert rows({}) == []
