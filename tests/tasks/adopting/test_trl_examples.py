"""What is read of TRL scripts for supervised fine-tuning and preferences, written as people write them."""

from pathlib import Path

import pytest

from tasks.adopting.adoption import text_of
from tasks.adopting.init_command import adopt
from tasks.configuration.problems import UNFILLED
from tests.tasks.adopting.test_trl_script import told, values

SFT = """
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
dataset = load_dataset("trl-lib/tldr", split="train")
args = SFTConfig("out", {arguments})
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", args, train_dataset=dataset{more})
trainer.train()
"""
DPO = """
import trl
from datasets import load_dataset
dataset = load_dataset("trl-lib/ultrafeedback_binarized", split="train")
trainer = trl.DPOTrainer(
    model="Qwen/Qwen2.5-0.5B", {more}
    args=trl.DPOConfig(output_dir="out", {arguments}),
    train_dataset=dataset,
)
"""


def test_a_script_of_fine_tuning_becomes_a_run_on_its_rows_without_rewards(read):
    found = read(SFT, "learning_rate=1e-5, max_steps=100, per_device_train_batch_size=4, gradient_accumulation_steps=8")
    assert values(found, "algorithm.kind", "policy.path", "data.source", "data.split", "run.num_prompts_per_step") == (
        "sft",
        "Qwen/Qwen2.5-0.5B",
        "trl-lib/tldr",
        "train",
        32,
    )
    assert values(found, "optimizer.learning_rate", "sampling.max_completion_length", "algorithm.label_smoothing") == (
        1e-5,
        1024,
        0,
    )
    assert [*found.missing] == ["run.url"] if "run.url" not in found.fields else not found.missing
    assert "rewards" not in text_of(found, "train.py")
    assert UNFILLED not in text_of(found, "train.py")


def test_a_script_of_preferences_becomes_a_run_on_pairs(read):
    found = read(DPO, "beta=0.2, max_steps=10, max_length=2048")
    assert values(found, "algorithm.kind", "algorithm.beta", "algorithm.rpo_alpha", "optimizer.learning_rate") == (
        "dpo",
        0.2,
        0.0,
        1e-6,
    )
    assert values(found, "sampling.max_completion_length", "run.num_prompts_per_step") == (2048, 8)
    assert not found.missing
    assert values(read(DPO, "max_steps=10"), "algorithm.beta", "sampling.max_completion_length") == (0.1, 1024)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('loss_type="sigmoid"', (0.0, None)),
        ('loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.3]', (0.3, None)),
        ('loss_type=["robust", "sft"], label_smoothing=0.1', (1.0, 0.1)),
        ('loss_type="robust", label_smoothing=0.2', (0.0, 0.2)),
    ],
)
def test_losses_of_pairs_that_are_here_are_carried_over(read, arguments, expected):
    found = read(DPO, f"max_steps=10, {arguments}")
    assert values(found, "algorithm.rpo_alpha", "algorithm.label_smoothing") == expected
    assert "algorithm.kind" not in found.missing


@pytest.mark.parametrize(
    ("template", "arguments", "name"),
    [
        (DPO, 'loss_type="ipo"', "loss_type"),
        (DPO, 'loss_type=["sigmoid", "bco_pair"]', "loss_type"),
        (DPO, 'loss_type=["sigmoid", "sft"], loss_weights=[0.8, 1.0]', "loss_type"),
        (DPO, 'f_divergence_type="forward_kl"', "f_divergence_type"),
        (DPO, "sync_ref_model=True", "sync_ref_model"),
        (SFT, 'loss_type="dft"', "loss_type"),
        (SFT, "completion_only_loss=False", "completion_only_loss"),
    ],
)
def test_another_loss_leaves_the_kind_open(read, template, arguments, name):
    found = read(template, f"max_steps=10, {arguments}")
    assert "algorithm.kind" in found.missing
    assert told(found, name)


def test_defaults_say_nothing_and_what_differs_is_told(read):
    quiet = read(SFT, 'max_steps=10, packing=False, dataset_text_field="text", truncation_mode="keep_start"')
    assert {each.name for each in quiet.messages} == {"max_length", "the number of processes"}
    loud = read(
        SFT,
        "max_steps=10, packing=True, label_smoothing_factor=0.1, assistant_only_loss=True",
        ", eval_dataset=dataset, formatting_func=shown",
    )
    assert values(loud, "algorithm.label_smoothing") == (0.1,)
    for name in ("packing", "assistant_only_loss", "eval_dataset", "formatting_func"):
        assert told(loud, name)
    assert told(read(DPO, "max_steps=10", "ref_model=other,"), "ref_model") == (
        "the reference is the run's first weights"
    )


def test_losses_that_are_not_known_leave_the_kind_open(read):
    assert {"algorithm.kind", "algorithm.rpo_alpha"} <= {*read(DPO, "max_steps=10, loss_type=chosen()").missing}


def test_a_limit_of_null_is_open(read):
    assert "sampling.max_completion_length" in read(SFT, "max_steps=10, max_length=None").missing


def test_a_command_line_is_read_for_fine_tuning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = """
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
def main(script_args, training_args, model_args):
    SFTTrainer(model_args.model_name_or_path, training_args, train_dataset=rows)
main(*TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config())
"""
    Path("sft.py").write_text(script)
    words = ("--model_name_or_path", "Qwen/Qwen3-0.6B", "--learning_rate", "3e-5", "--max_steps", "7")
    found = adopt("trl", Path("sft.py"), words)
    assert values(found, "algorithm.kind", "optimizer.learning_rate", "optimizer.total_steps") == ("sft", 3e-5, 7)


def test_a_script_with_two_of_them_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("both.py").write_text("from trl import SFTConfig, DPOConfig\nSFTConfig()\nDPOConfig()\n")
    with pytest.raises(ValueError, match=r"^both\.py: it uses SFTTrainer and DPOTrainer; allowed: one of them$"):
        adopt("trl", Path("both.py"))
