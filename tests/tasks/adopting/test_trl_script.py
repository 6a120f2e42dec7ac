# ruff: noqa: E501 - tables of scripts
"""What is read of TRL scripts and their command lines, written as people write them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.adopting.init_command import adopt
from tasks.configuration.run_config import parse

TOP = "from trl import GRPOConfig, GRPOTrainer\nfrom peft import LoraConfig\n"
PARSED = TOP + "from trl import TrlParser, ModelConfig, ScriptArguments, get_peft_config\n"
MAIN = """
def main(script_args, training_args, model_args):
    {body}
if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
"""
GSM8K = 'load_dataset("openai/gsm8k", "main", split="train")'
RATE, BETA, LENGTH = "optimizer.learning_rate", "algorithm.kl_coef", "sampling.max_completion_length"


@pytest.fixture
def read(tmp_path, monkeypatch):
    """read(script, *words) -> the adoption of the script, which lies in the current directory."""
    monkeypatch.chdir(tmp_path)

    def adopted(script, *words, name="train.py"):
        Path(name).write_text(script)
        return adopt("trl", Path(name), words)

    return adopted


def values(adoption, *fields):
    return tuple(adoption.fields[field].value if field in adoption.fields else None for field in fields)


def told(adoption, name):
    """The reason that is given for a setting."""
    [found] = [each for each in adoption.messages if each.name == name]
    return found.reason


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("LR = 2e-5\nGRPOConfig(learning_rate=LR)", 2e-5),
        ("LR: float = 2e-5\nRATE = LR\nGRPOConfig(learning_rate=RATE / 2)", 1e-5),
        ("LR, B = 2e-5, 3\nGRPOConfig(learning_rate=LR)", 2e-5),
        ("def main():\n    LR = 2e-5\n    GRPOConfig(learning_rate=LR)", 2e-5),
        ('if __name__ == "__main__":\n    LR = 2e-5\n    GRPOConfig(learning_rate=LR)', 2e-5),
        ("LR = 2e-5\ndef other(LR): pass\ndef main(): GRPOConfig(learning_rate=LR)", 2e-5),
        ("common = dict(learning_rate=2e-5)\nGRPOConfig(**common)", 2e-5),
        ("common = {'beta': 1, **{'learning_rate': 2e-5}}\nGRPOConfig(**common)", 2e-5),
        ("args = GRPOConfig(learning_rate=1)\nargs.learning_rate = 2e-5", 2e-5),
        ("args = GRPOConfig()\nsetattr(args, 'learning_rate', 2e-5)", 2e-5),
        ("trainer = GRPOTrainer('m', args=GRPOConfig())\ntrainer.args.learning_rate = 2e-5", 2e-5),
        ("class Mine(GRPOConfig):\n    learning_rate: float = 2e-5\nMine()", 2e-5),
        ("GRPOConfig(learning_rate=float('2e-5'))", 2e-5),
        # These are not known before the script runs.
        ("LR = 1e-5\nLR = 2e-5\nGRPOConfig(learning_rate=LR)", None),
        ("if big:\n    LR = 1e-5\nelse:\n    LR = 2e-5\nGRPOConfig(learning_rate=LR)", None),
        ("if big:\n    LR = 1e-5\nGRPOConfig(learning_rate=LR)", None),
        ("for LR in (1e-5, 2e-5):\n    GRPOConfig(learning_rate=LR)", None),
        ("LR = 1e-5\nLR *= 2\nGRPOConfig(learning_rate=LR)", None),
        ("LR = 1e-5\ndef change():\n    global LR\n    LR = 2\nGRPOConfig(learning_rate=LR)", None),
        ("LR = 1e-5\nwith a as LR:\n    GRPOConfig(learning_rate=LR)", None),
        ("LR = 1e-5\ndef main(LR):\n    GRPOConfig(learning_rate=LR)", None),
        ("LR = 1e-5\nif (LR := 2e-5): pass\nGRPOConfig(learning_rate=LR)", None),
        ("from settings import LR\nGRPOConfig(learning_rate=LR)", None),
        ("GRPOConfig(learning_rate=1e-5 if big else 2e-5)", None),
        ("common = dict(learning_rate=2e-5)\ncommon['learning_rate'] = 1\nGRPOConfig(**common)", None),
        ("common = dict(learning_rate=2e-5)\ncommon.update(f())\nGRPOConfig(**common)", None),
        ("GRPOConfig(**load())", None),
        ("args = GRPOConfig(learning_rate=1e-5)\nif big:\n    args.learning_rate = 2e-5", None),
        ("args = GRPOConfig(learning_rate=1e-5)\nargs.learning_rate *= 2", None),
        ("args = GRPOConfig(learning_rate=1e-5)\nargs = replace(args, learning_rate=2e-5)", None),
        ("def tweak(args):\n    args.learning_rate = 2e-5\ntweak(GRPOConfig(learning_rate=1e-5))", None),
    ],
)
def test_a_value_counts_if_every_run_of_the_script_has_it(read, script, value):
    adoption = read(TOP + script)
    if value is None and "replace" not in script:
        assert RATE in adoption.open
        assert RATE not in adoption.fields
    elif value is None:
        assert any("may set anything" in each.reason for each in adoption.messages)
    else:
        assert values(adoption, RATE) == (value,)


def test_a_change_after_construction_replaces_the_value_and_says_so(read):
    adoption = read(TOP + "args = GRPOConfig('o', beta=0.1)\nargs.beta = 0.02")
    assert values(adoption, BETA) == (0.02,)
    assert told(adoption, "beta") == "given again on line 4"


@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        (GSM8K, {"source": "openai/gsm8k", "subset": "main", "split": "train"}),
        ('load_dataset(path="a/b", name="c", revision="d")["test"]', {"source": "a/b", "subset": "c", "revision": "d", "split": "test"}),
        ('load_dataset("a/b", split="train[:1000]").select(range(10))', {"source": "a/b", "split": "train", "limit": 10}),
        ('load_dataset("a/b", split="train").take(7).shuffle(seed=1)', {"source": "a/b", "split": "train", "limit": 7}),
        ('load_dataset("json", data_files="x.jsonl", split="train")', {"source": "x.jsonl"}),
        ('load_dataset("parquet", data_files={"train": ["x.parquet"]})["train"]', {"source": "x.parquet"}),
        ('load_from_disk("rows")["train"]', {"source": "rows", "split": "train"}),
        ('load_dataset("a/b", split="train").rename_column("q", "prompt")', {"source": "a/b", "split": "train", "prompt_column": "q"}),
        ('load_dataset("a/b", split="train").remove_columns(["x"])', {"source": "a/b", "split": "train"}),
    ],
)  # fmt: skip
def test_a_data_set_is_named_as_it_is(read, rows, fields):
    adoption = read(f"{TOP}ds = {rows}\nGRPOTrainer('m', args=GRPOConfig(), train_dataset=ds)")
    found = {field[5:]: each.value for field, each in adoption.fields.items() if field.startswith("data.")}
    assert found == fields | {"seed": 42}
    document = {field: value for field, value in found.items() if field != "seed"}
    parse({"run": {"url": "u"}, "policy": {"path": "p"}, "rewards": [{"function": "math"}], "data": document})


@pytest.mark.parametrize(
    "rows",
    [
        f"{GSM8K}.map(f)",
        f"{GSM8K}.filter(f).select(range(5))",
        f"{GSM8K}.shuffle().select(range(5))",
        f"{GSM8K}.select([1, 5])",
        f"{GSM8K}.select(range(3, 9))",
        f"{GSM8K}.rename_column('a', 'b')",
        f"{GSM8K}.train_test_split(0.1)['train']",
        "Dataset.from_list([])",
        "mine()",
        "load_dataset(PATH)",
        'load_dataset("a/b", split="train[10%:]")',
        'load_dataset("a/b", data_dir="x")',
        'load_dataset("json", data_files=["a.jsonl", "b.jsonl"])["train"]',
        f"{GSM8K} if small else None",
        "concatenate_datasets([a, b])",
    ],
)
def test_other_rows_than_those_of_a_source_leave_it_open(read, rows):
    adoption = read(f"{TOP}GRPOTrainer('m', args=GRPOConfig(), train_dataset={rows})")
    assert "data.source" in adoption.open
    assert not {"data.source", "data.subset", "data.split", "data.limit"} & adoption.fields.keys()
    assert "line 3" in adoption.missing["data.source"]


def test_a_data_set_that_is_changed_step_by_step_is_followed(read):
    steps = f"ds = {GSM8K}\nds = ds.select(range(9))\nGRPOTrainer('m', args=GRPOConfig(), train_dataset=ds)\n"
    assert values(read(TOP + steps), "data.source", "data.limit") == ("openai/gsm8k", 9)
    branch = steps.replace("ds = ds.select", "if small: ds = ds.select")
    assert "not always the same" in read(TOP + branch).open["data.source"]
    mapped = steps.replace("select(range(9))", "map(f)")
    assert ".map(...) on line 4 makes other rows of openai/gsm8k" in read(TOP + mapped).open["data.source"]


FUNCTIONS = """
from rules import first, second as two
from trl.rewards import accuracy_reward, think_format_reward
import checks.maths as cm, deep.er
def own(completions, **columns): return [1.0]
def make(n, k=1): return own
class Judge:
    def __init__(self, strict): pass
    def __call__(self, completions, **columns): return [1.0]
THINK = r"<think>(?!.*<think>)(.*?)</think>.*"
"""
THINK = {
    "function": "format",
    "name": "think_format_reward",
    "arguments": {"pattern": r"<think>(?!.*<think>)(.*?)</think>.*"},
}


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ("own", [{"function": "train:own"}]),
        ("[own, first, two]", [{"function": "train:own"}, {"function": "rules:first"}, {"function": "rules:second"}]),
        ("[cm.check, deep.er.f]", [{"function": "checks.maths:check"}, {"function": "deep.er:f"}]),
        ("[make(3, k=2), Judge(True)]", [{"function": "train:make", "arguments": {"n": 3, "k": 2}}, {"function": "train:Judge", "arguments": {"strict": True}}]),
        ("['org/reward']", [{"function": "reward_model", "model": "org/reward"}]),
        ("[think_format_reward, accuracy_reward]", [THINK, {"function": "trl.rewards:accuracy_reward"}]),
        ("[lambda completions: 1, own]", ["???", {"function": "train:own"}]),
        ("[partial(own, n=3), own]", ["???", {"function": "train:own"}]),
        ("[unknown, own]", ["???", {"function": "train:own"}]),
        ("[make(f()), own]", ["???", {"function": "train:own"}]),
        ("pick()", None),
        ("[lambda completions: 1]", None),
    ],
)  # fmt: skip
def test_a_reward_function_is_named_or_left_open_in_its_place(read, functions, expected):
    adoption = read(f"{TOP}{FUNCTIONS}GRPOTrainer('m', {functions}, GRPOConfig())")
    if expected is None:
        assert "rewards" in adoption.open
        return
    assert values(adoption, "rewards") == (expected,)
    opened = [f"rewards.{index}" for index, each in enumerate(expected) if each == "???"]
    assert [field for field in adoption.missing if field.startswith("rewards")] == opened
    assert len([each for each in adoption.messages if each.name.startswith("reward_funcs[")]) == len(opened)


def test_a_function_within_a_function_has_no_name_elsewhere(read):
    adoption = read(f"{TOP}def main():\n    def own(completions): pass\n    GRPOTrainer('m', own, GRPOConfig())\n")
    assert "inside of something" in told(adoption, "reward_funcs[0]")
    assert "rewards" in adoption.open


def test_weights_belong_to_their_functions_and_a_script_that_runs_on_import_is_doubted(read):
    script = f"{TOP}{FUNCTIONS}GRPOTrainer('m', [own, first], GRPOConfig(reward_weights=WEIGHTS))\n"
    adoption = read(script.replace("WEIGHTS", "[1, 0.5]"))
    assert [each["weight"] for each in values(adoption, "rewards")[0]] == [1, 0.5]
    assert {"rewards.0.weight", "rewards.1.weight"} <= {*read(script.replace("WEIGHTS", "w()")).open}
    assert {"rewards.0.weight", "rewards.1.weight"} <= {*read(script.replace("WEIGHTS", "[1]")).open}
    [doubt] = [each for each in adoption.messages if each.name == "the script itself"]
    assert (doubt.kind, doubt.line) == ("not sure", 13)
    asked = f"{TOP}{FUNCTIONS}if __name__ == '__main__':\n    GRPOTrainer('m', own, GRPOConfig())\n"
    assert not [each for each in read(asked).messages if each.name == "the script itself"]


@given(parts=st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", "<", "think>", " "]), max_size=14))
def test_the_format_of_trls_thinking_is_the_same_expression(parts):
    """TRL matches `^<think>(?!.*<think>)(.*?)</think>.*$` from the beginning, with these flags."""
    text = "".join(parts)
    theirs = re.match(r"^<think>(?!.*<think>)(.*?)</think>.*$", text, re.DOTALL | re.MULTILINE)
    ours = re.compile(THINK["arguments"]["pattern"], re.DOTALL).fullmatch(text)
    assert bool(theirs) is bool(ours)


def test_tools_and_an_environment_are_named_and_what_has_no_name_is_open(read):
    script = f"{TOP}def add(a: int): pass\nclass Game: pass\nGRPOTrainer('m', args=GRPOConfig(LIMIT), ARGUMENTS)\n"

    def adopted(arguments, limit=""):
        return read(script.replace("ARGUMENTS", arguments).replace("LIMIT", limit))

    adoption = adopted("tools=[add], environment_factory=Game", "max_tool_calling_iterations=3")
    fields = ("turns.tools", "turns.environment", "turns.turns_max")
    assert values(adoption, *fields) == (["train:add"], "train:Game", 4)
    assert values(adopted("tools=[add]"), "turns.turns_max") == (10_000,)
    assert "turns.tools" in adopted("tools=[lambda x: x]").open
    assert "turns.tools" in adopted("tools=get_tools()").open
    assert "turns.environment" in adopted("environment_factory=lambda: Game()").open
    assert "turns.agent" in adopted("rollout_func=roll").open
    assert not [field for field in adopted("tools=None, tools_=[]").missing if field.startswith("turns")]


@pytest.mark.parametrize("name", ["callbacks", "optimizers", "reward_processing_classes", "quantization_config"])
def test_other_arguments_of_the_trainer_are_named(read, name):
    adoption = read(f"{TOP}GRPOTrainer('m', args=GRPOConfig(), {name}=[make()])\n")
    assert [each for each in adoption.messages if each.name == name and each.line == 3]
    assert not [each for each in read(f"{TOP}GRPOTrainer('m', args=GRPOConfig(), {name}=None)").messages if each.line]


def test_the_learning_rate_counts_with_every_form_of_adamw_and_is_open_with_another_optimizer(read):
    for form in ("adamw_torch", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit"):
        adoption = read(f"{TOP}GRPOConfig(learning_rate=2e-5, optim='{form}')")
        assert (values(adoption, RATE), RATE in adoption.open) == ((2e-5,), False)
    assert told(adoption, "optim") == "the moments of AdamW are in float32"
    for other in ("'adafactor'", "'lion_8bit'", "'sgd'", "'stable_adamw'"):
        adoption = read(f"{TOP}GRPOConfig(learning_rate=2e-5, optim={other})")
        assert adoption.open[RATE] == "optim (line 3): the optimizer is AdamW, and learning_rate 2e-05 is for another"
    assert RATE in read(f"{TOP}GRPOConfig(learning_rate=2e-5, optim=chosen())").open


def test_a_tokenizer_counts_unless_it_is_the_models_own(read):
    trainer = "GRPOTrainer('MODEL', args=GRPOConfig(), processing_class=tok)"
    script = f"tok = AutoTokenizer.from_pretrained('m')\nCHANGE\n{trainer}"
    for change, model, is_told in (("", "m", False), ("", "n", True), ("tok.chat_template = t", "m", True)):
        adoption = read(TOP + script.replace("CHANGE", change).replace("MODEL", model))
        assert bool([each for each in adoption.messages if each.name == "processing_class"]) is is_told


@pytest.mark.parametrize(
    ("arguments", "lora", "named"),
    [
        ("", (8, 8.0, None), []),
        ("r=16, lora_alpha=32, target_modules=['q_proj']", (16, 32.0, ["q_proj"]), []),
        ("r=16, lora_alpha=32, use_rslora=True, target_modules='all-linear'", (16, 128.0, []), ["use_rslora"]),
        ("r=16, lora_alpha=F, use_rslora=True", (16, None, None), ["lora_alpha", "use_rslora"]),
        ("use_rslora=F", (8, None, None), ["use_rslora"]),
        ("target_modules=r'.*q_proj'", (8, 8.0, None), ["lora_target_modules"]),
        ("lora_dropout=0.05, bias='all', modules_to_save=['lm_head']", (8, 8.0, None), ["lora_dropout", "LoraConfig.bias", "lora_modules_to_save"]),
        ("lora_dropout=0.0, bias='none', task_type=TaskType.CAUSAL_LM, inference_mode=False", (8, 8.0, None), []),
        ("task_type='CAUSAL_LM', init_lora_weights=True, modules_to_save=[]", (8, 8.0, None), []),
        ("init_lora_weights='pissa', rank_pattern={'a': 4}, layers_to_transform=[1], use_dora=True", (8, 8.0, None),
         ["LoraConfig.init_lora_weights", "LoraConfig.rank_pattern", "LoraConfig.layers_to_transform", "use_dora"]),
        ("**more", (None, None, None), ["peft_config"]),
    ],
)  # fmt: skip
def test_every_field_of_an_adapter_is_carried_or_named(read, arguments, lora, named):
    adoption = read(f"{TOP}p = LoraConfig({arguments})\nGRPOTrainer('m', args=GRPOConfig(), peft_config=p)")
    fields = ("lora.rank", "lora.alpha", "lora.target_modules")
    assert values(adoption, *fields) == lora
    assert {field for field, value in zip(fields, lora, strict=True) if value is None} == {*adoption.open} - {
        "optimizer.total_steps"
    }
    assert {each.name for each in adoption.messages if each.line == 3} == {*named}


def test_an_adapter_that_is_not_used_is_none_and_one_of_an_unknown_kind_is_open(read):
    unused = read(f"{TOP}p = LoraConfig(r=4)\nGRPOTrainer('m', args=GRPOConfig())")
    assert not [field for field in (*unused.fields, *unused.open) if field.startswith("lora.")]
    assert "trainer does not get it" in told(unused, "LoraConfig")
    inside = read(f"{TOP}p = LoraConfig(r=4)\nm = get_peft_model(m, p)\nGRPOTrainer(m, args=GRPOConfig())")
    assert values(inside, "lora.rank") == (4,)
    unknown = read(f"{TOP}GRPOTrainer('m', args=GRPOConfig(), peft_config=make())")
    assert {"lora.rank", "lora.alpha", "lora.target_modules"} <= {*unknown.open}
    changed = f"{TOP}p = LoraConfig(r=4)\np.r = 8\np.use_dora = f()\nGRPOTrainer('m', args=GRPOConfig(), peft_config=p)"
    assert values(read(changed), "lora.rank") == (8,)
    assert "f() is no literal" in told(read(changed), "use_dora")


def test_a_command_line_is_read_as_trls_parser_reads_it(read):
    rows = "load_dataset(script_args.dataset_name, name=script_args.dataset_config)[script_args.dataset_train_split]"
    model, adapter = "model_args.model_name_or_path", "peft_config=get_peft_config(model_args)"
    body = f"GRPOTrainer({model}, [own], training_args, {rows}, {adapter})"
    script = f"{PARSED}def own(completions): pass\n{MAIN.replace('{body}', body)}"
    Path("c.yaml").write_text("learning_rate: 1e-5\nbeta: 0.1\nuse_peft: true\nlora_r: 4\ndataset_config: main\n")
    words = "--config c.yaml --beta 0.2 --dataset_name openai/gsm8k --model_name_or_path org/m --bf16 false"
    adoption = read(script, *words.split(), "--no_gradient_checkpointing", "--lora_target_modules", "q_proj", "v_proj")
    assert values(adoption, RATE, BETA, "trainer.dtype", "trainer.gradient_checkpointing") == (
        1e-5,
        0.2,
        "float32",
        False,
    )
    assert values(adoption, "data.source", "data.subset", "data.split") == ("openai/gsm8k", "main", "train")
    assert values(adoption, "policy.path", "rewards") == ("org/m", [{"function": "train:own"}])
    assert values(adoption, "lora.rank", "lora.alpha", "lora.target_modules") == (4, 32.0, ["q_proj", "v_proj"])
    assert "adapters have no dropout" in told(adoption, "lora_dropout (0.05 by default)")
    changed = read(script.replace("    GRPOTrainer", "    training_args.beta = 0.3\n    GRPOTrainer"), *words.split())
    assert values(changed, BETA) == (0.3,)
    mapped = read(script.replace("_split],", "_split].map(f),"), *words.split())
    assert "data.source" in mapped.open


def test_a_yaml_file_of_trl_is_read_alone(read):
    functions = "[accuracy_reward, my.mod.f, get_soft_overlong_punishment]"
    text = f"dataset_name: a/b\nreward_funcs: {functions}\nnum_processes: 4\nmin_p: 0.1\n"
    adoption = read(text, "--beta=0.5", name="grpo.yaml")
    punishment = {"max_completion_len": 1280, "soft_punish_cache": 256}
    assert values(adoption, "rewards") == (
        [
            {"function": "trl.rewards:accuracy_reward"},
            {"function": "my.mod:f"},
            {"function": "trl.rewards:get_soft_overlong_punishment", "arguments": punishment},
        ],
    )
    processes = ("run.num_prompts_per_step", "trainer.nproc_per_node", "pools.train.gpus")
    assert values(adoption, BETA, *processes) == (0.5, 4, 4, 4)
    assert [each.line for each in adoption.messages if each.name == "min_p"] == [4]


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (PARSED + MAIN.replace("{body}", "pass"), (), "it reads its settings from the command line"),
        (TOP + "GRPOConfig()", ("--beta", "1"), "it reads no command line"),
        (PARSED + MAIN.replace("{body}", "pass"), ("beta",), "no command line of TRL"),
        (PARSED + MAIN.replace("{body}", "pass"), ("--config", "none.yaml"), "--config: none.yaml cannot be read"),
        (PARSED + MAIN.replace("{body}", "pass"), ("--config",), "--config: allowed: one YAML file"),
    ],
)
def test_a_command_line_that_does_not_go_with_the_script_is_refused(read, script, words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(script, *words)


def test_a_schedule_without_its_number_of_steps_is_open_and_not_another(read):
    adoption = read(TOP + "GRPOConfig(warmup_ratio=0.1)")
    assert values(adoption, "optimizer.schedule") == ("linear",)
    assert {"optimizer.total_steps", "optimizer.warmup_steps"} <= {*adoption.open}
    constant = read(TOP + "GRPOConfig(lr_scheduler_type='constant', warmup_steps=10)")
    assert values(constant, "optimizer.schedule", "optimizer.warmup_steps") == ("constant", None)
    assert "no warm-up" in told(constant, "warmup_steps")
    assert "optimizer.schedule" in read(TOP + "GRPOConfig(lr_scheduler_type='polynomial')").open


def test_a_held_out_data_set_is_evaluated_if_the_script_evaluates(read):
    trainer = f"GRPOTrainer('m', args=GRPOConfig(ARGUMENTS), eval_dataset={GSM8K})"
    adoption = read(TOP + trainer.replace("ARGUMENTS", "eval_strategy='steps', eval_steps=10, temperature=0.9"))
    fields = ("source", "subset", "split", "shuffle")
    assert values(adoption, *(f"evaluation.data.{name}" for name in fields)) == ("openai/gsm8k", "main", "train", False)
    sampled = ("evaluation.interval", "evaluation.num_generations", "evaluation.sampling.temperature")
    assert values(adoption, *sampled) == (10, 8, 0.9)
    silent = read(TOP + trainer.replace("ARGUMENTS", ""))
    assert "TRL does not evaluate" in told(silent, "eval_dataset")
    assert not [field for field in silent.fields if field.startswith("evaluation")]
    unknown = TOP + trainer.replace("ARGUMENTS", "eval_strategy='epoch'").replace(GSM8K, "held_out()")
    assert {"evaluation.data.source", "evaluation.interval"} <= {*read(unknown).open}
