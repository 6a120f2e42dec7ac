import json
from pathlib import Path
from typing import Any

import pytest

from tasks.configuration.run_config import RunConfig, parse
from tasks.forecasting.inputs import ForecastInputs, gather
from tasks.forecasting.probe import NoProbe
from tasks.forecasting.trainer_inputs import flops_per_parameter
from tests.forecast_documents import document

UNPROBED = NoProbe(reason="not asked")
QWEN_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "vocab_size": 32000,
}


def config(**sections: Any) -> RunConfig:
    return parse(document(**sections))


@pytest.mark.parametrize(
    ("sections", "operations"),
    [
        ({}, 6),
        ({"trainer": {"gradient_checkpointing": True}}, 8),
        ({"lora": {"rank": 8}}, 4),
        ({"algorithm": {"kl_coef": 0.1}}, 8),
        ({"algorithm": {"num_mini_batches": 2}}, 8),
        ({"algorithm": {"num_mini_batches": 2, "old_logprobs": "sampler"}}, 6),
        ({"algorithm": {"num_epochs": 2}}, 14),
        ({"algorithm": {"preset": "ppo", "num_mini_batches": 1, "num_epochs": 1, "kl_coef": 0.0, "kl_in": "loss"}}, 14),
    ],
)
def test_operations_of_a_training_step(sections: dict[str, Any], operations: float):
    assert flops_per_parameter(config(**sections)) == operations


def test_a_teacher_takes_a_forward_pass_of_each_response_and_its_memory(tmp_path: Path):
    for name, layers in (("same", 16), ("larger", 160)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(QWEN_1B | {"num_hidden_layers": layers}))
    pools = {"train": {"machine": "p5.48xlarge", "gpus": 8}}
    given = {"policy": {"path": str(tmp_path / "same")}, "pools": pools, "planning": {"seeding": "off"}}
    given["forecast"] = {"parameters_billions": None, "kv_bytes_per_token": None}
    given["trainer"] = {"nproc_per_node": 4, "dtype": "bfloat16"}

    def gathered(**sections: Any) -> ForecastInputs:
        return gather(config(**(given | sections)), UNPROBED)

    plain = gathered().trainer
    # A reference of the policy's size takes as long as a teacher of the policy's size.
    same = gathered(teacher={"path": str(tmp_path / "same")})
    reference = gathered(algorithm={"kl_coef": 0.1}).trainer
    assert same.trainer.train_s_per_token == pytest.approx(reference.train_s_per_token)
    assert same.trainer.train_s_per_token == pytest.approx(plain.train_s_per_token * 8 / 6)
    larger = gathered(teacher={"path": str(tmp_path / "larger")})
    assert larger.trainer.train_s_per_token > 3 * plain.train_s_per_token
    assert larger.trainer.load_s > plain.load_s
    found = {each.name: each.source for each in larger.shown}
    assert "and 22 GB of the section teacher" in found["train: memory"]
    assert "2 per parameter of the teacher" in found["train: step"]
    in_pool = {"path": str(tmp_path / "larger"), "pool": "teachers"}
    apart = gathered(teacher=in_pool, pools=pools | {"scoring": {"teachers": {}}})
    assert apart.trainer == plain
    assert apart.scorers is not None
    assert apart.scorers.score_s_per_token == 0.0
    assert ("teachers: scoring", "unknown: left out of time") in [(each.name, each.value) for each in apart.shown]
    gpu = {"machine": "p5.48xlarge", "gpus": 1, "count": 3, "usd_per_hour": 2.5}
    fast = gathered(teacher=in_pool, pools=pools | {"scoring": {"teachers": gpu}}).scorers
    assert fast is not None
    # The trainer's passes are over four GPUs, a scorer's over one.
    assert fast.score_s_per_token == pytest.approx(4 * (larger.trainer.train_s_per_token - plain.train_s_per_token))
    assert (fast.name, fast.count, fast.usd_per_h) == ("teachers", 3, 2.5)
    assert fast.process_s > 0
    by_vllm = in_pool | {"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}
    of_two = gathered(teacher=by_vllm, pools=pools | {"scoring": {"teachers": gpu | {"gpus": 4}}})
    assert of_two.scorers is not None
    assert of_two.scorers.score_s_per_token == pytest.approx(fast.score_s_per_token / 2)
    assert "2 x H100" in next(each.source for each in of_two.shown if each.name == "teachers: scoring")
    unknown = {"machine": "ours", "gpus": 1, "usd_per_hour": 2.5}
    with pytest.raises(LookupError, match=r"^.?pools\.scoring\.teachers: "):
        gathered(teacher=in_pool, pools=pools | {"scoring": {"teachers": unknown}})
    several = {"column": "subject", "paths": {name: str(tmp_path / name) for name in ("same", "larger")}}
    both = gathered(teacher=several).trainer
    mean = (same.trainer.train_s_per_token + larger.trainer.train_s_per_token) / 2
    assert both.train_s_per_token == pytest.approx(mean)
    with pytest.raises(ValueError, match="of the section teacher; allowed: "):
        gathered(teacher=several | {"paths": {f"t{number}": str(tmp_path / "larger") for number in range(20)}})


def test_a_teacher_that_is_not_at_hand_is_shown_as_left_out():
    inputs = gather(config(teacher={"path": "/nowhere/teacher"}), UNPROBED)
    [shown] = [each for each in inputs.shown if each.name == "teacher.path"]
    assert shown.value == "unknown: left out of memory and time"
    assert "/nowhere/teacher" in shown.source
    assert inputs.trainer == gather(config(), UNPROBED).trainer
