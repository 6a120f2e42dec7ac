"""`gleaner init` as a user meets it: what it writes, what `gleaner check` says to it, and what it refuses."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tasks.adopting.adoption import FILL_IN, Adoption, Setting, text_of
from tasks.adopting.init_command import LIBRARIES, adopt
from tasks.configuration.other_names import OTHER_NAMES, TRL, VERL
from tasks.configuration.problems import UNFILLED, names_at
from tasks.configuration.run_config import ConfigError, RunConfig, parse
from tests.test_gleaner import gleaner, refused

OPEN = UNFILLED
GUIDE = Path(__file__).parents[1] / "docs" / "guide" / "configuration.md"
SCRIPT = """\
from trl import GRPOConfig as Config, GRPOTrainer
raise SystemExit("this script is never executed")
config = Config(
    "out/first",
    learning_rate=1e-5,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=4,
    steps_per_generation=8,
    epsilon_high=0.28,
    loss_type="grpo",
    beta=0.04,
    lr_scheduler_type="cosine",
    max_steps=200,
    warmup_ratio=0.1,
    report_to=["wandb", "none"],
    logging_steps=1,
    temperature="hot",
    min_p=0.1,
    seed=read_seed(),
)
trainer = GRPOTrainer(model="models/tiny", args=config, peft_config=peft.LoraConfig(r=8, lora_alpha=16))
"""
OVERRIDES = """\
#!/bin/bash
# it's a comment, with data.seed=5 in it
RATE=${RATE:-3e-6} TWICE=1
TWICE=2
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/train.parquet data.val_files=test.parquet \\
    data.train_batch_size=256 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=${PART:-64} data.seed=$TWICE \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.optim.lr=$RATE \\
    actor_rollout_ref.model.path="models/a tiny one" \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.top_k=-1 \\
    custom_reward_function.path=mine/reward.py \\
    trainer.logger='["console","wandb"]' \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 \\
    +algorithm.magic=1 "$@"
"""


def init(tmp_path, library, text, *more):
    """The result of the command, and the configuration that it wrote."""
    file, target = tmp_path / "source", tmp_path / "mine.yaml"
    file.write_text(text)
    result = gleaner("init", "--from", library, file, "--to", target, *more)
    assert result.exit_code == 0, result.stderr
    return result, yaml.safe_load(target.read_text())


def test_a_script_of_trl_becomes_a_configuration(tmp_path):
    result, document = init(tmp_path, "trl", SCRIPT)
    assert document["run"] == {"url": "out/first", "seed": OPEN, "num_prompts_per_step": 16, "num_generations": 8}
    assert document["policy"] == {"path": "models/tiny"}
    assert document["lora"] == {"rank": 8, "alpha": 16.0, "target_modules": OPEN}
    assert document["sampling"] == {"temperature": OPEN, "max_completion_length": 512}
    algorithm = document["algorithm"]
    assert (algorithm["clip_ratio_low"], algorithm["clip_ratio_high"]) == (0.2, 0.28)
    assert (algorithm["loss_agg_mode"], algorithm["kl_coef"]) == ("seq-mean-token-mean", 0.04)
    assert (algorithm["num_mini_batches"], algorithm["advantage_eps"]) == (2, 1e-4)
    assert document["optimizer"] == {
        "learning_rate": 1e-5,
        "warmup_steps": 20,
        "schedule": "cosine",
        "total_steps": 200,
    }
    assert document["tracking"] == {"backends": ["wandb"]}
    processes = "no script says it; run.num_prompts_per_step is for 1, so write 16 times yours"
    bias = "Gleaner does not multiply the KL by the ratio of the loss"
    hot = 'sampling.temperature: "hot" given; input should be a valid number'
    peft = "PEFT's choice for your model, such as [q_proj, v_proj] for Llama and Qwen; [] for all linear layers"
    assert result.stdout.splitlines()[:-1] == [
        f"not sure: the number of processes: {processes}",
        f"not carried over: use_bias_correction_kl (true by default since TRL 1.16): {bias}",
        "not sure: max_completion_length: 512 is the default of TRL 1.16; it was 256 until TRL 1.8",
        "not carried over: line 16: logging_steps: every iteration is recorded and can be continued",
        f"not carried over: line 17: temperature: {hot}",
        "not carried over: line 18: min_p: there is no such setting in Gleaner",
        "not carried over: line 19: seed: read_seed() is no literal",
        "fill in: run.seed: seed (line 19): read_seed() is no literal",
        f"fill in: data.source: {FILL_IN['data.source'][0]}",
        "fill in: data.seed: seed (line 19): read_seed() is no literal",
        f"fill in: rewards: {FILL_IN['rewards'][0]}",
        f"fill in: sampling.temperature: temperature, hot, does not go: {hot}",
        f"fill in: lora.target_modules: {peft}",
    ]


def test_overrides_of_verl_become_a_configuration(tmp_path):
    result, document = init(tmp_path, "verl", OVERRIDES)
    assert document["run"] == {"url": OPEN, "num_prompts_per_step": 256, "num_generations": 4}
    assert document["policy"] == {"path": "models/a tiny one"}
    assert document["data"] == {"source": OPEN, "seed": OPEN, "max_prompt_length": 512}
    assert document["rewards"] == [{"function": "mine.reward:compute_score"}]
    assert document["sampling"] == {"top_k": 0, "max_completion_length": 512}
    assert document["optimizer"] == {"learning_rate": 3e-6, "weight_decay": 0.01}
    assert document["tracking"] == {"backends": ["wandb"]}
    assert document["evaluation"]["interval"] == 5
    assert document["evaluation"]["data"] == {"source": "test.parquet", "shuffle": False}
    algorithm = document["algorithm"]
    assert (algorithm["kl_coef"], algorithm["kl_in"], algorithm["num_mini_batches"]) == (0.001, "loss", 4)
    assert (algorithm["clip_ratio_high"], algorithm["clip_ratio_c"]) == (0.2, 3.0)
    assert algorithm["importance_sampling"] == "none"
    assert "gae_lambda" not in algorithm  # nothing reads verl's default of it with this estimator
    assert document["trainer"]["nproc_per_node"] == document["pools"]["train"]["gpus"] == 8
    assert document["rollout"]["vllm"]["tensor_parallel_size"] == document["pools"]["rollout"]["gpus"] == 2
    assert [line for line in result.stdout.splitlines() if line.startswith("not carried over")] == [
        "not carried over: line 7: data.train_files: $HOME/train.parquet is no literal",
        "not carried over: line 9: data.seed: $TWICE is no literal",
        "not carried over: line 18: trainer.total_epochs: `--count` says how many iterations are trained",
        "not carried over: line 19: algorithm.magic: there is no such setting in Gleaner",
    ]


@pytest.mark.parametrize(("library", "text"), [("trl", SCRIPT), ("verl", OVERRIDES)])
def test_check_names_all_that_is_to_fill_in_at_once_and_accepts_the_rest(tmp_path, library, text):
    result, document = init(tmp_path, library, text.replace("wandb", "console"))  # W&B need not be installed
    named = re.findall(r"^fill in: ([\w.]+): ", result.stdout, flags=re.MULTILINE)
    complaints = refused(gleaner("check", tmp_path / "mine.yaml"))[1:]
    assert complaints == [f"  {field}: ??? given; fill it in" for field in named]
    assert named
    known = {"seed": 1, "temperature": 1.0, "target_modules": []} | {
        field.rpartition(".")[2]: value for field, (_, value) in FILL_IN.items()
    }
    for field in named:
        section, _, name = field.rpartition(".")
        (document[section] if section else document)[name] = known[name]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(document))
    assert gleaner("check", tmp_path / "mine.yaml").exit_code == 0


@pytest.mark.parametrize(
    ("library", "text", "message"),
    [
        ("trl", "def (:", "it is no Python: line 1: invalid syntax"),
        ("trl", "\0", "it is no Python: "),
        ("trl", "-" * 100_000 + "1", "it is no Python"),
        (
            "trl",
            "print('GRPOConfig(beta=1)')",
            "it has no call of GRPOConfig; allowed: a Python script with exactly one",
        ),
        ("trl", "GRPOConfig()\ntrl.GRPOConfig()", "it has 2 calls of GRPOConfig, on lines 1, 2; allowed: exactly one"),
        ("verl", "", "it has no override of verl; allowed: a shell script or a list of words key.name=value"),
        ("verl", "A=1 python x.py --b=2", "it has no override of verl"),
        ("verl", "a.b=1\nc.d='2", "it is no shell script: line 2: no closing quotation"),
        ("verl", "a.b=\udcff", "line 1: byte 0xff is not UTF-8"),
        ("verl", "x" * (1 << 20) + "y", "it is more than 1048576 bytes long"),
    ],
)
def test_a_file_that_holds_no_configuration_is_refused_in_one_line(tmp_path, library, text, message):
    file = tmp_path / "source"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    [line] = refused(gleaner("init", "--from", library, file, "--to", tmp_path / "mine.yaml"))
    assert line.startswith(f"gleaner: {file}: {message}")
    assert not (tmp_path / "mine.yaml").exists()


def test_a_file_that_exists_is_not_overwritten(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    (tmp_path / "source").write_text(SCRIPT)
    [line] = refused(gleaner("init", "--from", "trl", tmp_path / "source", "--to", tmp_path / "mine.yaml"))
    assert line == f"gleaner: --to: {tmp_path / 'mine.yaml'} exists; allowed: a file that does not exist"
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_a_file_that_is_not_there_is_refused(tmp_path):
    [line] = refused(gleaner("init", "--from", "trl", tmp_path / "none.py", "--to", tmp_path / "mine.yaml"))
    assert "No such file" in line


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.lists(st.integers(-2, 2), max_size=2)
)
TELLING = st.sampled_from(
    ["dapo", "cispo", "sequence", "cosine", "gspo", "kl", "none", "token", "vllm", 1, 2, 8, 0.5, True]
)
UNKNOWN = "f() is no literal"


def settled(library, settings):
    """The adoption of settings, and what `check` complains about in its configuration."""
    known = LIBRARIES[library]
    adoption = Adoption(settings, known.name, known.defaults)
    known.carry_over(adoption)
    text = text_of(adoption, "script\x1b[31m")
    assert "\x1b" not in text
    try:
        parse(yaml.safe_load(text))
    except ConfigError as error:
        return adoption, [problem.split(":")[0] for problem in error.problems]
    return adoption, []


@pytest.mark.parametrize(("library", "names"), [("trl", sorted(TRL)), ("verl", sorted(VERL))])
@given(data=st.data())
def test_whatever_the_values_are_the_result_is_a_configuration_but_for_what_is_open(library, names, data):
    given_values = data.draw(st.dictionaries(st.sampled_from(names), VALUES | TELLING, max_size=12))
    unknown = data.draw(st.sets(st.sampled_from([*names, "**"]), max_size=3))
    settings = [
        Setting(line=line, name=name, value=value) for line, (name, value) in enumerate(given_values.items(), 1)
    ]
    settings += [Setting(line=99, name=name, unknown=UNKNOWN) for name in sorted(unknown)]
    adoption, complaints = settled(library, settings)
    assert complaints == [*adoption.missing]


def test_a_large_number_among_floats_alone_is_left_open():
    """Such a document is taken for one that Flyte's console sent, in which large integers are rounded."""
    hidden = Setting(line=9, name="**", unknown=UNKNOWN)
    adoption, complaints = settled("trl", [Setting(line=1, name="weight_decay", value=2.0**53), hidden])
    assert "optimizer.weight_decay" in complaints
    assert complaints == [*adoption.missing]


def test_of_rewards_that_are_open_no_single_one_is_asked_for():
    hidden = Setting(line=9, name="**", unknown=UNKNOWN)
    adoption, complaints = settled("trl", [Setting(line=1, name="reward_funcs", value=False), hidden])
    assert "rewards" in complaints
    assert complaints == [*adoption.missing]


@pytest.mark.parametrize(
    ("library", "name", "field"),
    [(library, name, field) for library, table in (("trl", TRL), ("verl", VERL)) for name, field in table.items()],
)
def test_a_setting_whose_value_is_not_known_is_never_a_default(library, name, field):
    """It leaves a field open, unless it has no effect without others; either way it is named."""
    adoption, complaints = settled(library, [Setting(line=7, name=name, unknown=UNKNOWN)])
    assert any(each.name == name and each.line == 7 for each in adoption.messages)
    opened = [path for path, what in adoption.open.items() if UNKNOWN in what]
    assert set(opened) <= set(complaints)
    is_off = field.startswith(("lora.", "evaluation.", "critic.")) or name in WITHOUT_EFFECT
    assert opened or is_off, (name, [*adoption.open])


# Settings that are read together with others only, which are not given here.
WITHOUT_EFFECT = {
    "algorithm.filter_groups.max_num_gen_batches",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.kl_penalty",
    "algorithm.rollout_correction.rollout_is_threshold",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.optim.total_training_steps",
    "actor_rollout_ref.actor.kl_loss_type",
    "eval_steps",
    "reward_weights",
    "save_steps",
    "trainer.save_freq",
    "vllm_importance_sampling_cap",
}


def test_variables_that_multiply_do_not_fill_the_memory(tmp_path):
    doubled = [f"V{n + 1}=" + f"$V{n}" * 100 for n in range(60)]
    (tmp_path / "source").write_text("\n".join(["V0=x", *doubled, "data.prompt_key=$V60 data.seed=$V0"]))
    reasons = {each.name: each.reason for each in adopt("verl", tmp_path / "source").messages}
    assert len(reasons["data.prompt_key"]) < 200
    assert reasons["data.seed"].startswith('data.seed: "x" given; ')


def test_settings_that_contradict_each_other_leave_their_fields_open(tmp_path):
    (tmp_path / "source").write_text("GRPOConfig(loss_type='sapo', scale_rewards='x', num_generations=3, bf16=False)")
    adoption = adopt("trl", tmp_path / "source")
    told = {each.name: each.reason for each in adoption.messages}
    assert told["loss_type"].startswith("Gleaner has no such loss; allowed: ")
    assert told["scale_rewards"].startswith('algorithm.scale_rewards: "x" given; ')
    assert "no whole groups" in told["run.num_prompts_per_step"]
    assert adoption.fields["trainer.dtype"].value == "float32"
    opened = ("policy_loss", "loss_agg_mode", "scale_rewards", "num_mini_batches")
    assert {f"algorithm.{name}" for name in opened} | {"run.num_prompts_per_step"} <= {*adoption.open}


def test_a_default_that_clashes_with_a_value_is_left_open(tmp_path):
    (tmp_path / "source").write_text("GRPOConfig(vllm_max_model_length=200)")
    adoption = adopt("trl", tmp_path / "source")
    assert adoption.fields["rollout.context_length"].value == 200
    assert "rollout.context_length (200)" in adoption.open["sampling.max_completion_length"]


@pytest.mark.parametrize("path", sorted({*TRL.values(), *VERL.values()}))
def test_every_name_is_of_a_field_that_exists(path):
    *section, name = path.split(".")
    assert name in names_at(RunConfig, tuple(section))


def test_the_guide_says_of_a_name_what_the_table_says():
    part = GUIDE.read_text(encoding="utf-8").partition("## Names in other libraries")[2].partition("\n### ")[0]
    compared = 0
    for row in re.findall(r"^\| (`.*) \|$", part, flags=re.MULTILINE):
        ours, *theirs = row.split(" | ")
        fields = re.findall(r"`([\w.]+)`", ours)
        section = fields[0].rpartition(".")[0]
        fields = [field if "." in field else f"{section}.{field}" for field in fields]
        for cell, table in zip(theirs[:2], (TRL, OTHER_NAMES | VERL), strict=True):
            for name in re.findall(r"`([\w.]+)[`:]", cell):
                if name in table:
                    compared += 1
                    assert table[name] in fields or name == "loss_type", (name, row)
    assert compared > 20
