"""The parts of `benchmarks.post_training`: their configurations, a curve, and what they claim of given curves."""

import json
from pathlib import Path

import pytest

from benchmarks.learning_run import WARM_START, make_run
from benchmarks.post_training import distillation, over_runs, sft
from benchmarks.post_training.curve import Curve, learn, rows
from examples.warm_start import build_model, build_tokenizer


def policy(folder: Path) -> Path:
    """An untrained policy of the demo's vocabulary."""
    tokenizer = build_tokenizer()
    build_model(len(tokenizer), hidden_size=16, layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_curve_has_the_first_policy_and_each_version(tmp_path: Path) -> None:
    model, examples = policy(tmp_path / "model"), tmp_path / "examples.jsonl"
    examples.write_text(
        "".join(json.dumps({"prompt": f"a{k}=", "completion": f"a{k}0{k};#{k}"}) + "\n" for k in range(8))
    )
    sections = {"rewards": [], "data": {"source": str(examples)}, "algorithm": {"kind": "sft"}}
    curve = learn(make_run(tmp_path / "arm", model, 0, killed=False, **sections), model, 2)
    assert list(curve.held_out) == [0, 0, 0]
    first, second = (metrics["loss"] for metrics in curve.metrics)
    assert second < first


def test_arms_learn_of_the_source_and_differ_in_their_kind(tmp_path: Path) -> None:
    given = over_runs.arms(str(tmp_path / "source"))
    configs = {
        name: make_run(tmp_path / name, tmp_path, 0, killed=False, **sections).config
        for name, sections in given.items()
    }
    assert {name: config.algorithm.kind for name, config in configs.items()} == {
        over_runs.SFT: "sft",
        over_runs.DPO: "dpo",
    }
    for config in configs.values():
        assert list(config.data.runs) == [str(tmp_path / "source")]
        assert config.run.url != str(tmp_path / "source")


@pytest.mark.parametrize(
    ("last", "met"), [((0.5, 0.45), [True, True]), ((0.6, 0.38), [True, False]), ((0.41, 0.3), [False, False])]
)
def test_each_seed_must_gain_and_the_mean(last: tuple[float, ...], met: list[bool]) -> None:
    curves = {over_runs.DPO: [Curve([0.4, 0.9, each], []) for each in last]}
    mean, seeds = over_runs.targets(curves)
    assert [mean.met, seeds.met] == met
    assert mean.name == "dpo_over_runs_gain_mean"
    assert mean.value == pytest.approx(sum(last) / 2 - 0.4)


def test_a_row_has_the_mean_of_the_seeds_by_version() -> None:
    curves = {distillation.ALONE: [Curve([0.1, 0.2], []), Curve([0.3, 0.6], [])]}
    assert list(rows(curves)) == [{"arm": "grpo", "version 0": 0.2, "version 1": 0.4}]


def test_grpo_begins_with_the_last_version_that_sft_publishes(tmp_path: Path) -> None:
    first = make_run(tmp_path, tmp_path, 2, killed=False, **sft.sections_of_sft(tmp_path, 2, WARM_START)).config
    then = make_run(tmp_path, tmp_path, 2, killed=False, **sft.sections_of_grpo(tmp_path, 2)).config
    assert (first.algorithm.kind, then.algorithm.kind) == ("sft", "rl")
    assert then.run.from_ == f"{first.run.url}@{sft.SFT_ITERATIONS}"
    # Each step takes as many examples as a step of the warm start, and there are as many steps.
    assert first.run.num_prompts_per_step == WARM_START.batch * first.algorithm.num_mini_batches
    assert first.algorithm.num_mini_batches * sft.SFT_ITERATIONS == WARM_START.steps


@pytest.mark.parametrize(
    ("after", "met"),
    [
        ([(0.25, 0.3), (0.35, 0.36)], [True, True, True]),
        ([(0.15, 0.3), (0.4, 0.5)], [False, True, True]),
        ([(0.3, 0.3), (0.3, 0.5)], [True, False, True]),
        ([(0.22, 0.3), (0.23, 0.5)], [True, True, False]),
        ([(0.4, 0.5), (0.4, 0.5)], [True, True, False]),
    ],
)
def test_each_seed_must_gain_by_sft_as_by_the_loop_and_again_by_grpo(
    after: list[tuple[float, float]], met: list[bool]
) -> None:
    chains = [sft.Chain(Curve([0.0, 0.1, by_sft], []), Curve([by_sft, by_grpo], []), 0.3) for by_sft, by_grpo in after]
    assert [target.met for target in sft.targets(chains)] == met
    assert sft.row(5, chains[0]) == {
        "seed": 5,
        "random weights": 0.0,
        "after the loop": 0.3,
        "after SFT": after[0][0],
        "after GRPO": after[0][1],
    }
