import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.estimators import ESTIMATORS
from tasks.configuration.losses import LOSSES
from tasks.configuration.presets import PRESETS, with_preset


def read(document):
    return TypeAdapter(AlgorithmConfig).validate_json(json.dumps(document))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_same_as_its_fields_written_out_and_honoured(name):
    assert read({"preset": name}) == AlgorithmConfig(**PRESETS[name])
    assert set(PRESETS[name]) <= {item.name for item in fields(AlgorithmConfig)}


def test_dapo_can_be_had_with_and_without_its_dynamic_sampling():
    assert read({"preset": "dapo"}) == AlgorithmConfig(overlong_buffer_length=4096, filter_groups=True)
    found = read({"preset": "dapo", "filter_groups": False})
    assert found == AlgorithmConfig(overlong_buffer_length=4096)


def test_fields_that_are_given_win():
    found = read({"preset": "grpo", "kl_coef": 0, "clip_ratio_high": 0.3})
    assert (found.kl_coef, found.clip_ratio_high, found.loss_agg_mode) == (0.0, 0.3, "seq-mean-token-mean")
    assert with_preset({"kl_coef": 1}) == {"kl_coef": 1}
    assert PRESETS["grpo"]["kl_coef"] == 0.04


@pytest.mark.parametrize("name", ["GRPO", "", None, 3, ["grpo"]])
def test_an_unknown_preset_is_refused_with_those_there_are(name):
    with pytest.raises(ValidationError, match=r"preset: value .*; allowed: grpo, dr_grpo, dapo, rloo"):
        read({"preset": name})


def test_presets_differ_from_each_other_and_every_loss_and_estimator_without_a_baseline_has_one():
    resolved = [json.dumps(preset, sort_keys=True) for preset in PRESETS.values()]
    assert len(set(resolved)) == len(PRESETS)
    assert {p["policy_loss"] for p in PRESETS.values()} == set(LOSSES)
    estimators = set(ESTIMATORS) - {"reinforce_plus_plus_baseline"}
    assert {p["advantage_estimator"] for p in PRESETS.values()} == estimators


def test_the_guide_has_a_row_for_every_preset():
    text = (Path(__file__).parents[3] / "docs/guide/algorithms.md").read_text(encoding="utf-8")
    table = text.partition("## Presets")[2].partition("## ")[0]
    rows = {name: row for name, row in re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE) if name != "preset"}
    assert set(rows) == set(PRESETS)
    for name, preset in PRESETS.items():
        for field in ("advantage_estimator", "policy_loss", "loss_agg_mode"):
            assert f"`{preset[field]}`" in rows[name]
        for field in ("clip_ratio_low", "clip_ratio_high", "kl_coef"):
            value = preset.get(field, 0)
            assert value == 0 or re.search(rf"(?<![\d.]){value:g}(?![\d.])", rows[name]), (name, field)
