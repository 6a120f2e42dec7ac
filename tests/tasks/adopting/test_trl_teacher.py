"""What is read of TRL scripts with a teacher, of GKD and of the distillation trainer, written as people write them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tasks.adopting.adoption import text_of
from tasks.adopting.init_command import adopt
from tasks.adopting.trl_defaults import ALL, OF_TEACHERS
from tasks.configuration.problems import UNFILLED
from tasks.configuration.run_config import parse
from tests.tasks.adopting.test_trl_script import told, values

GKD = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-0.5B-Instruct")
teacher_model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-1.5B-Instruct", revision="v2")
training_args = GKDConfig(output_dir="gkd-model", {arguments})
trainer = GKDTrainer(
    model=model,
    teacher_model=teacher_model,
    args=training_args,
    processing_class=tokenizer,
    train_dataset=load_dataset("trl-lib/chatbot_arena_completions", split="train"),{more}
)
trainer.train()
"""
DISTILLATION = """
from datasets import load_dataset
from trl import DistillationConfig, DistillationTrainer
trainer = DistillationTrainer(
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    DistillationConfig("out", {arguments}),
    train_dataset=load_dataset("trl-lib/tldr", split="train"),{more}
)
trainer.train()
"""
ON_POLICY = "max_steps=10, lmbda=1.0, temperature=1.0"


def test_a_script_of_gkd_on_own_responses_becomes_a_run_with_a_teacher(read):
    found = read(GKD, f"{ON_POLICY}, per_device_train_batch_size=4, gradient_accumulation_steps=8")
    assert values(found, "policy.path", "teacher.path", "teacher.revision", "data.source", "run.url") == (
        "Qwen/Qwen2-0.5B-Instruct",
        "Qwen/Qwen2-1.5B-Instruct",
        "v2",
        "trl-lib/chatbot_arena_completions",
        "gkd-model",
    )
    assert values(found, "teacher.kl", "sampling.temperature", "sampling.max_completion_length") == ("jsd", 1.0, 128)
    assert values(found, "run.num_prompts_per_step", "run.num_generations") == (16, 2)
    assert values(found, "optimizer.learning_rate", "optimizer.total_steps") == (2e-5, 10)
    # Only how large the head is, TRL's script cannot say.
    assert [*found.missing] == ["teacher.top_k"]
    assert "rewards" not in text_of(found, "train.py")
    assert {each.name for each in found.messages} == {
        "per_device_train_batch_size",
        "messages",
        "the number of processes",
    }


def test_a_script_of_distillation_becomes_a_run_that_parses_once_the_head_has_a_size(read):
    found = read(DISTILLATION, "max_steps=10, teacher_model_revision='main', top_p=0.9, use_vllm=True")
    assert values(found, "teacher.path", "teacher.kl", "sampling.top_p", "rollout.engine") == (
        "Qwen/Qwen2.5-1.5B-Instruct",
        "reverse",
        0.9,
        "vllm",
    )
    assert values(found, "sampling.max_completion_length", "optimizer.learning_rate") == (512, 1e-6)
    assert values(found, "sampling.temperature", "run.num_prompts_per_step", "algorithm.kl_coef") == (1.0, 4, None)
    assert [*found.missing] == ["teacher.top_k"]
    document: dict[str, dict[str, object]] = {"teacher": {"top_k": 16}}
    for field, carried in found.fields.items():
        section, _, name = field.partition(".")
        document.setdefault(section, {})[name] = carried.value
    config = parse(document)
    assert config.teacher is not None
    assert (config.teacher.kl, config.rewards) == ("reverse", ())


def divergence(beta: float) -> float:
    """TRL's generalized divergence of a policy and a teacher over two tokens, by its documented formula."""
    policy, teacher = np.array([0.9, 0.1]), np.array([0.4, 0.6])

    def kl(one, other):
        return float(np.sum(one * np.log(one / other)))

    if beta in (0, 1):
        return kl(policy, teacher) if beta else kl(teacher, policy)
    mixture = (1 - beta) * policy + beta * teacher
    return beta * kl(teacher, mixture) + (1 - beta) * kl(policy, mixture)


@pytest.mark.parametrize("template", [GKD, DISTILLATION])
def test_the_directions_of_the_divergence_are_not_exchanged(read, template):
    policy, teacher = np.array([0.9, 0.1]), np.array([0.4, 0.6])
    mean = (policy + teacher) / 2
    ours = {
        "reverse": float(np.sum(policy * np.log(policy / teacher))),
        "forward": float(np.sum(teacher * np.log(teacher / policy))),
        "jsd": float(sum(np.sum(each * np.log(each / mean)) for each in (policy, teacher)) / 2),
    }
    assert len({round(value, 3) for value in ours.values()}) == 3
    for beta in ("0", "0.0", "0.5", "1", "1.0"):
        [kl] = values(read(template, f"max_steps=10, beta={beta}"), "teacher.kl")
        assert ours[kl] == pytest.approx(divergence(float(beta)))


def test_a_divergence_between_the_three_is_left_open_with_what_there_is(read):
    found = read(GKD, f"{ON_POLICY}, beta=0.3")
    known = "0.3 given; allowed: forward for beta 0, jsd for beta 0.5, reverse for beta 1"
    assert found.missing["teacher.kl"] == f"beta (line 8): {known}"
    assert told(found, "beta") == known
    assert "teacher.kl" in read(GKD, f"{ON_POLICY}, beta=chosen()").missing


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        ("lmbda=0.25", "lmbda 0.25: TRL learns the data's completions in 0.75 of the batches, and here"),
        ("lmbda=0", "lmbda 0: TRL learns the data's completions in 1 of the batches, and here"),
        ("lmbda=0.25, seq_kd=True", "lmbda 0.25: TRL learns the teacher's responses in 0.75 of the batches, and here"),
        # TRL's default, of which a script says nothing.
        ("seq_kd=False", "lmbda 0.5: TRL learns the data's completions in 0.5 of the batches, and here"),
        ("lmbda=share()", "lmbda (line 8): share() "),
        ("lmbda=0.5, seq_kd=chosen()", "seq_kd (line 8): chosen() "),
    ],
)
def test_responses_that_are_not_the_policys_leave_the_weight_open(read, arguments, known):
    assert read(GKD, f"max_steps=10, temperature=1.0, {arguments}").missing["teacher.weight"].startswith(known)


def test_a_teacher_that_writes_no_response_is_no_matter(read):
    found = read(GKD, f"{ON_POLICY}, seq_kd=True")
    assert "teacher.weight" not in found.missing
    assert told(found, "seq_kd") == "lmbda is 1, so the teacher writes no response"


def test_the_temperature_of_gkd_is_told_because_its_divergence_has_none(read):
    found = read(GKD, "max_steps=10, lmbda=1.0")
    assert values(found, "sampling.temperature") == (0.9,)
    assert told(found, "temperature") == "TRL samples there and compares at 1; here both are at sampling.temperature"
    of_both = read(DISTILLATION, "max_steps=10, temperature=0.7")
    assert values(of_both, "sampling.temperature") == (0.7,)
    assert all(each.name != "temperature" for each in of_both.messages)


def test_a_batch_that_makes_no_groups_is_left_open(read):
    found = read(DISTILLATION, "max_steps=10, per_device_train_batch_size=3")
    assert found.missing["run.num_prompts_per_step"] == (
        "TRL samples one response to each of 3 prompts, and here a prompt has at least 2"
    )
    several = read(DISTILLATION, "max_steps=10, per_device_train_batch_size=1, gradient_accumulation_steps=6")
    assert values(several, "run.num_prompts_per_step") == (3,)


def test_a_teacher_by_arguments_is_read_and_an_unknown_one_is_open(read):
    found = read(
        GKD.replace("    teacher_model=teacher_model,\n", ""),
        f'{ON_POLICY}, teacher_model_name_or_path="org/t", '
        'teacher_model_init_kwargs={"revision": "r3", "dtype": torch.bfloat16}',
    )
    assert values(found, "teacher.path", "teacher.revision") == ("org/t", "r3")
    assert told(found, "teacher_model_init_kwargs") == "dtype: Gleaner loads the teacher itself"
    unknown = read(GKD.replace('"Qwen/Qwen2-1.5B-Instruct", revision="v2"', "name()"), ON_POLICY)
    assert unknown.missing["teacher.path"].startswith("teacher_model_name_or_path (line 7): name() ")
    none = read(GKD.replace("    teacher_model=teacher_model,\n", ""), ON_POLICY)
    assert none.missing["teacher.path"] == "the directory of the teacher, or its id on the hub"
    assert UNFILLED in text_of(none, "train.py")


def test_what_the_losses_do_not_read_is_named_and_defaults_are_not(read):
    quiet = read(GKD, f'{ON_POLICY}, loss_type="nll", max_length=1024, packing=False, disable_dropout=True')
    assert {each.name for each in quiet.messages} == {
        "per_device_train_batch_size",
        "messages",
        "the number of processes",
    }
    loud = read(GKD, f'{ON_POLICY}, loss_type="dft", max_length=2048, packing=True', "\n    eval_dataset=rows,")
    for name in ("loss_type", "max_length", "packing", "eval_dataset"):
        assert told(loud, name)
    assert values(loud, "algorithm.loss_agg_mode", "algorithm.kind") == (None, None)


def test_tools_of_the_distillation_trainer_are_the_runs(read):
    found = read("def add(a: int, b: int): ...\n" + DISTILLATION, "max_steps=10", "\n    tools=[add],")
    assert values(found, "turns.tools") == (["train:add"],)


def test_a_command_line_is_read_as_trls_own_script_of_gkd_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = """
from trl import ModelConfig, ScriptArguments, TrlParser
from trl.experimental.gkd import GKDConfig, GKDTrainer
if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GKDConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    trainer = GKDTrainer(
        model=model_args.model_name_or_path,
        teacher_model=training_args.teacher_model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
    )
"""
    Path("gkd.py").write_text(script)
    words = "--model_name_or_path s --teacher_model_name_or_path t --lmbda 1.0 --beta 0 --max_steps 7 --temperature 1.0"
    found = adopt("trl", Path("gkd.py"), words.split())
    assert values(found, "policy.path", "teacher.path", "teacher.kl", "optimizer.total_steps") == (
        "s",
        "t",
        "forward",
        7,
    )
    assert "teacher.weight" not in found.missing


def test_a_script_of_another_trainer_with_gkd_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("both.py").write_text("from trl import *\nSFTConfig()\nGKDConfig()\n")
    with pytest.raises(ValueError, match=r"^both\.py: it uses SFTTrainer and GKDTrainer; allowed: one of them$"):
        adopt("trl", Path("both.py"))


@pytest.fixture
def trl(monkeypatch):
    """TRL in the release whose defaults are written down."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    found = pytest.importorskip("trl", reason="TRL is not installed")
    if not found.__version__.startswith("1.16."):
        pytest.skip(f"needs trl 1.16 (found: {found.__version__})")
    return found


@pytest.mark.peers
@pytest.mark.parametrize("kind", OF_TEACHERS)
def test_the_defaults_are_trls(trl, kind):
    from trl.experimental.gkd import GKDConfig  # noqa: PLC0415

    config = {"gkd": GKDConfig, "distillation": trl.DistillationConfig}[kind]
    theirs = {each.name: each.default for each in dataclasses.fields(config) if each.default is not dataclasses.MISSING}
    own = OF_TEACHERS[kind]
    assert own.keys() <= theirs.keys()
    assert {name: theirs[name] for name in own} == own
    # Whatever else differs from GRPO's is of the machine or of the tokenizer.
    others = {name for name, value in theirs.items() if name not in own and ALL.get(name, "none") != value}
    assert others <= {"activation_offloading", "pad_token", "remove_unused_columns"}


@pytest.mark.peers
@pytest.mark.usefixtures("trl")
def test_the_directions_are_those_of_trls_own_loss():
    import torch  # noqa: PLC0415
    from trl.experimental.gkd import GKDTrainer  # noqa: PLC0415

    policy, teacher = (torch.tensor([[row]]).log() for row in ([0.9, 0.1], [0.4, 0.6]))
    for beta in (0.0, 0.3, 0.5, 1.0):
        theirs = GKDTrainer.generalized_jsd_loss(policy, teacher, beta=beta)
        assert float(theirs) == pytest.approx(divergence(beta), rel=1e-5)
