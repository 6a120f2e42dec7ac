"""What is read of verl's YAML files and overrides, beside the shell scripts of tests/test_gleaner_init.py."""

from pathlib import Path

import pytest
import yaml

from tasks.adopting.init_command import adopt
from tasks.adopting.verl_defaults import DEFAULTS, machinery_of

ACTOR = "actor_rollout_ref.actor"
TEXT = """\
# Of a recipe.
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [ppo_trainer, _self_]
data:
  train_files: /data/train.parquet
  train_batch_size: 256
  seed: ${trainer.seed}
actor_rollout_ref:
  model: {path: org/m, lora_rank: 32, target_modules: all-linear}
  actor:
    ppo_mini_batch_size: ${data.train_batch_size}
    optim: {lr: 1e-6, betas: [0.9, 0.95], lr_scheduler_type: cosine}
    entropy_coeff: 0.01
    fsdp_config: {param_offload: true, optimizer_offload: true}
  rollout: {name: vllm, n: 5, tensor_model_parallel_size: 4}
reward: {custom_reward_function: {path: my/reward.py, name: score}}
reward_model: {overlong_buffer: {enable: true, len: 64, penalty_factor: 1.0}}
algorithm: {adv_estimator: grpo, rollout_correction: {rollout_is: token, rollout_is_threshold: 5.0}}
trainer: {n_gpus_per_node: 4, nnodes: 2, total_epochs: 3}
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """read(text, *words) -> the adoption of a file, which lies in the current directory."""
    monkeypatch.chdir(tmp_path)

    def adopted(text, *words, name="ppo.yaml"):
        Path(name).write_text(text)
        return adopt("verl", Path(name), words)

    return adopted


def nested(settings):
    root = {}
    for name, value in settings.items():
        *parents, last = name.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return yaml.safe_dump(root)


def test_a_yaml_file_of_verl_becomes_a_configuration(read):
    adoption = read(TEXT, "actor_rollout_ref.rollout.n=8")
    expected = {
        "data.source": "/data/train.parquet",
        "run.num_prompts_per_step": 256,
        "run.num_generations": 8,
        "policy.path": "org/m",
        "lora.rank": 32,
        "lora.target_modules": [],
        "algorithm.num_mini_batches": 1,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.schedule": "cosine",
        "rewards": [{"function": "my.reward:score"}],
        "algorithm.overlong_buffer_length": 64,
        "algorithm.importance_sampling": "token",
        "algorithm.importance_sampling_cap": 5.0,
        "trainer.nproc_per_node": 4,
        "pools.train.gpus": 4,
        "trainer.nnodes": 2,
        "rollout.vllm.tensor_parallel_size": 4,
        "pools.rollout.gpus": 4,
    }
    assert {field: adoption.fields[field].value for field in expected} == expected
    assert {*adoption.open} == {"data.seed", "optimizer.total_steps"}
    told = [(each.line, each.name) for each in adoption.messages if each.line]
    assert told == [
        (7, "data.seed"),
        (13, f"{ACTOR}.entropy_coeff"),
        (14, f"{ACTOR}.fsdp_config"),
        (15, "actor_rollout_ref.rollout.n"),
        (19, "trainer.total_epochs"),
    ]


@pytest.mark.parametrize(
    ("name", "value", "fields"),
    [
        (f"{ACTOR}.policy_loss.loss_mode", "clip_cov", {"algorithm.policy_loss"}),
        (f"{ACTOR}.ppo_mini_batch_size", 100, {"algorithm.num_mini_batches"}),
        (f"{ACTOR}.optim.lr_scheduler_type", "wsd", {"optimizer.schedule"}),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio", 0.1, {"optimizer.warmup_steps"}),
        ("actor_rollout_ref.rollout.name", "sglang", {"rollout.engine"}),
        ("actor_rollout_ref.rollout.multi_turn.enable", True, {"turns.tools"}),
        ("actor_rollout_ref.rollout.do_sample", False, {"sampling.temperature"}),
        ("data.train_files", ["a.parquet", "b.parquet"], {"data.source"}),
        ("custom_reward_function.path", "/elsewhere/reward.py", {"rewards"}),
        ("reward_model.enable", True, {"rewards"}),
        ("algorithm.rollout_correction.rollout_is", "sequence", {"algorithm.importance_sampling"}),
        ("actor_rollout_ref.rollout.n", 1, {"run.num_generations"}),
    ],
)
def test_what_has_no_counterpart_of_its_value_leaves_the_field_open(read, name, value, fields):
    given = {"actor_rollout_ref.rollout.n": 4, "algorithm.adv_estimator": "grpo", name: value}
    adoption = read(nested(given))
    assert {*adoption.open} == fields
    is_named = [each for each in adoption.messages if each.name.startswith(name.rpartition(".")[0]) and each.line]
    assert is_named or name.endswith((".enable", ".do_sample"))


def test_of_settings_with_verls_own_defaults_nothing_is_said(read):
    """As in the file that Hydra stores beside a run; what has a counterpart is carried over."""
    settings = {name: value for name, value in DEFAULTS.items() if machinery_of(name) is None}
    settings |= {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.n": 8}
    adoption = read(nested(settings | {"algorithm.adv_estimator": "gae", "algorithm.use_pf_ppo": True}))
    assert [each.name for each in adoption.messages if each.kind == "not carried over"] == ["algorithm.use_pf_ppo"]
    assert not adoption.open
    bare = read(nested({"actor_rollout_ref.rollout.n": 8}))
    learned = ("run.", "algorithm.", "optimizer.", "sampling.", "critic.")
    for field, carried in bare.fields.items():
        if field.startswith(learned):
            assert adoption.fields[field].value == carried.value, field


def test_a_configuration_of_its_own_hides_what_is_learned(read):
    script = "python -m verl.trainer.main_ppo --config-name='gsm8k_own' actor_rollout_ref.actor.optim.lr=1e-6 \\\n"
    adoption = read(script, name="run.sh")
    assert adoption.fields["optimizer.learning_rate"].value == 1e-6
    assert {"run.num_generations", "sampling.temperature", "algorithm.kl_coef", "optimizer.weight_decay"} <= {
        *adoption.open
    }
    plain = read(script.replace("gsm8k_own", "ppo_trainer").replace("lr=1e-6", "lr=1e-6 data.seed=1"), name="run.sh")
    assert {*plain.open} == {"run.num_generations"}
    listed = read("defaults: [ppo_megatron_trainer, _self_]\ndata: {seed: 1}\n")
    assert "sampling.temperature" in listed.open


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("a: 1", (), "it is no configuration of verl; allowed: a mapping with sections such as"),
        ("- data", (), "it is no configuration of verl; allowed"),
        ("data: {seed: 1, seed: 2}", (), "it is no configuration of verl: line 1"),
        ("data: {seed: 1}", ("--x",), "'--x' behind it; allowed: overrides, key.name=value"),
    ],
)
def test_what_is_no_configuration_of_verl_is_refused_in_one_line(read, text, words, message):
    with pytest.raises(ValueError, match=r"^ppo\.yaml: ") as caught:
        read(text, *words)
    assert str(caught.value).removeprefix("ppo.yaml: ").startswith(message)
