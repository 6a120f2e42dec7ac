"""What is said of a trainer whose GPUs are too small, before any of them is paid for."""

import json

import pytest

from tasks.configuration.run_config import parse
from tasks.preparing.trainer_fit import TrainerMisfit, check_trainer_fits
from tests.forecast_documents import document

QWEN_7B = {
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
H100 = {"train": {"machine": "p5.48xlarge", "gpus": 8}}
SHORT = {"max_completion_length": 1024}
LONG = {"max_completion_length": 32768}


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    return tmp_path


def checked(model, trainer, pools=H100, **sections):
    config = parse(document(trainer={"dtype": "bfloat16", **trainer}, pools=pools, **sections))
    return check_trainer_fits(config, model, config.teacher)


def test_a_state_that_no_gpu_holds_is_refused_with_what_would_fit(model):
    with pytest.raises(TrainerMisfit) as refused:
        checked(model, {})
    assert str(refused.value) == (
        "trainer.nproc_per_node: 1 processes on H100-80GB would hold 137 GB of 80, 18 bytes per parameter; allowed: "
        "at least 2 processes (trainer.nnodes x nproc_per_node), or the section lora with at least 1, for 17 GB"
    )


def test_a_pass_that_hardly_fits_is_doubted_with_what_would_fit(model):
    [doubt] = checked(model, {}, lora={"rank": 16}, sampling=LONG)
    assert doubt.startswith(
        "trainer.micro_batch_tokens_max: a pass of 33,024 tokens takes about 211.3 GB beside 16.0 GB"
    )
    assert doubt.endswith("H100-80GB (80 GB) has; expected: trainer.gradient_checkpointing: true")
    assert checked(model, {"gradient_checkpointing": True}, lora={"rank": 16}, sampling=LONG) == []
    several = {"nproc_per_node": 8, "gradient_checkpointing": True}
    assert checked(model, several, sampling=LONG) == []


def test_offload_and_moments_of_8_bits_count(model):
    h200 = {"train": {"machine": "p5.48xlarge", "accelerator": "nvidia-h200", "gpus": 8}}
    short = {"max_completion_length": 1024}
    checkpointed = {"gradient_checkpointing": True, "micro_batch_tokens_max": 4096}
    with pytest.raises(
        TrainerMisfit, match=r"optimizer\.name: adamw_8bit, or trainer\.offload: optimizer, or at least 2"
    ):
        checked(model, checkpointed, h200, sampling=short)
    assert checked(model, checkpointed | {"offload": "optimizer"}, h200, sampling=short) == []
    assert checked(model, checkpointed, h200, sampling=short, optimizer={"name": "adamw_8bit"}) == []


@pytest.fixture
def teacher(tmp_path):
    """Ten times the policy, in bfloat16 some 150 GB."""
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(QWEN_7B | {"num_hidden_layers": 320}))
    return {"path": str(tmp_path / "teacher")}


def test_a_teacher_that_no_gpu_holds_beside_the_policy_is_refused_with_what_would_fit(model, teacher):
    assert checked(model, {"nproc_per_node": 2, "gradient_checkpointing": True}, sampling=SHORT) == []
    with pytest.raises(TrainerMisfit) as refused:
        checked(model, {"nproc_per_node": 2}, teacher=teacher)
    assert str(refused.value) == (
        "trainer.nproc_per_node: 2 processes on H100-80GB would hold 273 GB of 160, 16 bytes per parameter and 151 GB "
        "of the section teacher; allowed: at least 4 processes (trainer.nnodes x nproc_per_node), or the section lora "
        "with at least 3, for 168 GB, or a smaller teacher"
    )
    assert checked(model, {"nproc_per_node": 8, "gradient_checkpointing": True}, teacher=teacher) == []
    several = {"column": "subject", "paths": dict.fromkeys(("math", "code", "prose"), teacher["path"])}
    with pytest.raises(TrainerMisfit, match=r"7 processes .* and 454 GB of the section teacher"):
        checked(model, {"nproc_per_node": 7}, teacher=several)
    pools = H100 | {"scoring": {"teachers": {}}}
    in_pool = teacher | {"pool": "teachers"}
    one = {"nproc_per_node": 2, "gradient_checkpointing": True}
    assert checked(model, one, pools, sampling=SHORT, teacher=in_pool) == []


def test_a_teacher_doubles_in_float32_and_one_of_no_known_size_is_passed_over(model, teacher):
    with pytest.raises(TrainerMisfit, match="and 303 GB of the section teacher"):
        checked(model, {"nproc_per_node": 4, "dtype": "float32"}, teacher=teacher)
    one = {"nproc_per_node": 2, "gradient_checkpointing": True}
    assert checked(model, one, sampling=SHORT, teacher={"path": "/nowhere"}) == []


def test_what_nothing_is_known_of_is_passed_over(model, tmp_path):
    assert checked(model, {}, {"train": {"gpus": 0}}, planning={"seeding": "off"}) == []
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard"}))
    assert checked(tmp_path, {}) == []
