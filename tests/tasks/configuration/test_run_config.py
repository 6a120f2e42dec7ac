import copy
import json
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.rollout import VllmConfig
from tasks.configuration.run_config import OPERATIONAL, ConfigError, differences, digest, dump, identity, load, parse

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
MINIMAL = {
    "run": {"url": "memory://x"},
    "policy": {"path": "model"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "arithmetic"}],
}


def with_value(path: str, value: object) -> dict:
    document = copy.deepcopy(MINIMAL)
    node = document
    *parents, last = path.split(".")
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return document


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_are_valid_and_survive_a_round_trip(file):
    config = load(file)
    assert parse(dump(config)) == config
    assert json.loads(json.dumps(dump(config))) == dump(config)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("algorithm.clip_ratio_lwo", 0.2, "algorithm.clip_ratio_lwo: unknown field; did you mean 'clip_ratio_low'?"),
        ("sampler", {}, "sampler: unknown field; did you mean 'sampling'?"),
        ("sampling.temperature", -1, "sampling.temperature: -1 given; input should be greater than or equal to 0"),
        ("sampling.top_p", 0, "sampling.top_p: 0 given"),
        ("run.seed", "seven", 'run.seed: "seven" given; input should be a valid integer'),
        ("run.seed", 1.5, "run.seed: 1.5 given"),
        ("run.num_generations", 0, "run.num_generations: 0 given; input should be greater than or equal to 1"),
        ("run.num_generations", 1, "run.num_generations: value 1; allowed without data.source 'submitted': at least 2"),
        ("run.num_generations", True, "run.num_generations: true given"),
        ("rewards", [], "rewards: [] given"),
        ("rewards", [{"function": "no such"}], "rewards.0.function: value 'no such'"),
        ("algorithm.kl_estimator", "k4", "algorithm.kl_estimator: \"k4\" given; input should be 'k1', 'k2' or 'k3'"),
        ("pools.train", {"interruptible": True}, "pools.train.interruptible: true given; allowed: false"),
        ("pools.rollout", {"memory": "lots"}, 'pools.rollout.memory: "lots" given'),
        ("policy.path", None, "policy.path: null given"),
        ("rollout.vllm.process", "none", "rollout.vllm.process: \"none\" given; input should be 'own' or 'same'"),
        ("rollout.vllm.gpu_memory_utilization", 1.5, "rollout.vllm.gpu_memory_utilization: 1.5 given"),
        ("rollout.vllm.kv_cache_memory_bytes", 1000, "rollout.vllm.kv_cache_memory_bytes: 1000 given"),
        ("rollout.vllm.tensor_parallel", 2, "unknown field; did you mean 'tensor_parallel_size'?"),
    ],
)
def test_what_is_wrong_is_named_with_its_path_and_what_is_allowed(path, value, message):
    with pytest.raises(ConfigError) as caught:
        parse(with_value(path, value))
    assert any(message in problem for problem in caught.value.problems), caught.value.problems


POD = {"placement": "pod"}
SHARED = {"placement": "shared", "fleet": "s3://bucket/fleet"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trainer": POD, "planning": {"seeding": "auto"}}, "planning.seeding: value 'auto'; allowed with"),
        (
            {"trainer": POD, "rewards": [{"function": "reward_model", "model": "/models/rm"}]},
            "rewards.0.model: given; allowed with",
        ),
        (
            {"trainer": {"placement": "shared"}},
            "trainer.fleet: value None; allowed with trainer.placement 'shared': the url of a fleet",
        ),
        (
            {"trainer": POD | {"fleet": "s3://bucket/fleet"}},
            "trainer.fleet: value 's3://bucket/fleet'; allowed with trainer.placement 'pod': null",
        ),
        ({"trainer": SHARED, "planning": {"seeding": "auto"}}, "allowed with trainer.placement 'shared': off"),
        (
            {"trainer": SHARED, "rewards": [{"function": "reward_model", "model": "/models/rm"}]},
            "rewards.0.model: given; allowed with trainer.placement 'shared'",
        ),
        ({"trainer": SHARED | {"nnodes": 2}}, "trainer.nnodes: value 2; allowed with trainer.placement 'shared': 1"),
        (
            {"trainer": SHARED | {"nproc_per_node": 2}, "pools": {"train": {"gpus": 8}}},
            "trainer.nproc_per_node: value 2; allowed with trainer.placement 'shared': pools.train.gpus (8)",
        ),
    ],
)
def test_what_a_train_phase_apart_from_the_rollout_cannot_have_is_refused(sections, message):
    with pytest.raises(ConfigError) as caught:
        parse(MINIMAL | sections)
    assert any(message in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.parametrize("gpus", [0, 8])
def test_a_shared_run_may_have_a_rank_for_each_gpu_or_any_number_without(gpus):
    sections = {"trainer": SHARED | {"nproc_per_node": 8}, "pools": {"train": {"gpus": gpus}}}
    assert parse(MINIMAL | sections).trainer.nproc_per_node == 8


OURS = {"rollout": {"engine": "torch"}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (OURS, True),
        ({"rollout": {"engine": "scripted"}}, True),
        # It may turn out to be vLLM, and a restarted trainer must find the same answer.
        ({"rollout": {"engine": "auto"}}, False),
        ({"rollout": {"engine": "vllm"}}, False),
        ({"rollout": {"engine": "torch", "dtype": "bfloat16"}}, False),
        (OURS | {"trainer": {"dtype": "bfloat16"}}, False),
        (OURS | {"algorithm": {"old_logprobs": "sampler"}}, False),
        (OURS | {"algorithm": {"importance_sampling": "token"}}, False),
        (OURS | {"algorithm": {"max_staleness": 1}}, False),
        (OURS | {"algorithm": {"max_staleness": 1, "importance_sampling": "none"}}, True),
        ({"rollout": {"engine": "vllm"}, "algorithm": {"filter_groups": True}}, True),
        ({"rollout": {"engine": "vllm"}, "algorithm": {"micro_batch_order": "plan"}}, True),
        (OURS | {"algorithm": {"micro_batch_order": "arrival"}}, False),
    ],
)
def test_groups_are_trained_in_the_order_of_the_plan_where_that_makes_equal_bits(sections, expected):
    config = parse(MINIMAL | sections)
    assert config.in_plan_order is expected
    # What is stored says "auto", and whoever reads it finds the same answer.
    assert parse(dump(config)).in_plan_order is expected
    assert dump(config)["algorithm"]["micro_batch_order"] == sections.get("algorithm", {}).get(
        "micro_batch_order", "auto"
    )


def test_a_train_phase_begins_late_and_where_the_whole_batch_is_needed_at_its_end():
    assert parse(MINIMAL | {"trainer": POD}).phase_start_share == 0.9
    assert parse(MINIMAL | {"trainer": POD, "algorithm": {"preset": "ppo"}}).phase_start_share == 1.0


@pytest.mark.parametrize("section", ["run", "policy", "data", "rewards"])
def test_a_missing_section_is_named(section):
    document = {name: value for name, value in MINIMAL.items() if name != section}
    with pytest.raises(ConfigError, match=f"{section}: missing; it has no default"):
        parse(document)


@pytest.mark.parametrize(("document", "what"), [({}, "empty"), (None, "empty"), ([1], "a list"), ("x", "a str")])
def test_what_is_not_a_mapping_is_refused(document, what):
    with pytest.raises(ConfigError, match=f"it is {what}; allowed: a mapping with sections run, policy"):
        parse(document)


def test_all_problems_are_told_at_once():
    document = with_value("sampling.temperature", -1)
    document["run"]["seed"] = "x"
    with pytest.raises(ConfigError) as caught:
        parse(document)
    assert len(caught.value.problems) == 2


def test_each_problem_of_a_section_and_between_sections_has_a_line_with_its_path():
    within = MINIMAL | {"algorithm": {"gamma": 0.5, "kl_in": "reward"}}
    between = MINIMAL | {"algorithm": {"num_mini_batches": 99}, "trainer": {"fleet": "s3://b/fleet"}}
    for document, paths in (
        (within, ["algorithm.kl_in", "algorithm.gamma"]),
        (between, ["algorithm.num_mini_batches", "trainer.fleet"]),
    ):
        with pytest.raises(ConfigError) as caught:
            parse(document)
        assert [line.partition(":")[0] for line in caught.value.problems] == paths


def test_numbers_as_yaml_reads_them_are_numbers(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(MINIMAL)[:-1] + ', "optimizer": {"learning_rate": 1e-6}}')
    assert load(file).optimizer.learning_rate == 1e-6
    assert parse(with_value("optimizer.learning_rate", "3e-5")).optimizer.learning_rate == 3e-5
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        parse(with_value("optimizer.learning_rate", "fast"))


def test_unreadable_files_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("run: [")
    with pytest.raises(ConfigError, match="not YAML or JSON"):
        load(tmp_path / "bad.yaml")


def test_identity_ignores_where_and_how_fast_but_not_what_is_learned():
    base = digest(parse(MINIMAL))
    for path, value in (("pools.rollout", {"count": 9}), ("rollout.flush_interval_s", 1.0), ("run.lease_ttl_s", 10.0)):
        assert digest(parse(with_value(path, value))) == base
    assert digest(parse(with_value("data.allow", ["dropped_message"]))) == base
    files = with_value("data.source", "rows.jsonl")
    for name, value in (("continue_final_message", True), ("chat_template_kwargs", {"enable_thinking": False})):
        assert digest(parse({**files, "data": {**files["data"], name: value}})) != digest(parse(files))
    for path, value in (("run.seed", 1), ("algorithm.clip_ratio_low", 0.1), ("rollout.dtype", "bfloat16")):
        assert digest(parse(with_value(path, value))) != base


def test_a_younger_default_counts_as_the_value_that_it_replaced():
    """A run that began without Liger's kernels goes on with "auto", which may mean none, and not with true."""

    def named(**trainer: object) -> str:
        return digest(parse({**MINIMAL, "trainer": trainer}))

    assert named() == named(use_liger_kernel="auto") == named(use_liger_kernel=False)
    assert named(use_liger_kernel=True) != named()
    assert identity(parse(MINIMAL))["trainer"]["use_liger_kernel"] is False
    assert named(compile_layers=False) == named() != named(compile_layers=True)


def test_a_setting_that_is_younger_than_a_run_counts_only_where_it_is_set():
    base, kept = parse(MINIMAL), parse(with_value("sampling.skip_special_tokens", False))
    assert dump(base)["sampling"]["skip_special_tokens"] is True
    assert identity(base)["sampling"].keys() == {"temperature", "top_p", "top_k", "max_completion_length"}
    assert digest(kept) != digest(base) == digest(parse(with_value("sampling.skip_special_tokens", True)))
    assert differences(identity(kept), identity(base)) == ["sampling.skip_special_tokens: false here, nothing there"]


def test_a_run_from_before_a_setting_of_prompts_goes_on_with_its_default():
    stored = dump(parse(MINIMAL))
    for name in ("allow", "chat_template_kwargs", "continue_final_message"):
        del stored["data"][name]
    assert differences(identity(parse(MINIMAL)), identity(parse(stored))) == []


OTHER_VLLM_VALUES = {
    "process": "same",
    "batch_invariant": False,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 1 << 30,
    "tensor_parallel_size": 2,
    "quantization": "fp8",
    "max_lora_rank": 16,
    "enforce_eager": True,
    "cache_dir": "/volume/compiled",
}


@pytest.mark.parametrize("name", [item.name for item in fields(VllmConfig)])
def test_identity_holds_of_vllm_what_changes_the_tokens(name):
    adapters = {"lora": {"rank": 8, "publish": "adapter"}}  # without which max_lora_rank is refused
    other = parse(with_value(f"rollout.vllm.{name}", OTHER_VLLM_VALUES[name]) | adapters)
    assert getattr(other.rollout.vllm, name) == OTHER_VLLM_VALUES[name]
    changes = digest(other) != digest(parse(MINIMAL | adapters))
    assert changes == (name in {"batch_invariant", "quantization", "max_lora_rank"})
    assert changes == (name not in OPERATIONAL["rollout.vllm"])


def test_differences_name_each_field():
    a, b = identity(parse(MINIMAL)), identity(parse(with_value("run.seed", 5)))
    assert differences(a, b) == ["run.seed: 0 here, 5 there"]


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda leaf: st.lists(leaf, max_size=3) | st.dictionaries(st.text(max_size=5), leaf, max_size=3),
        max_leaves=8,
    )
)
def test_garbage_is_a_config_error_and_nothing_else(document):
    with pytest.raises(ConfigError):
        parse(document)


def test_the_overlong_buffer_is_within_the_length_of_responses():
    document = MINIMAL | {"algorithm": {"overlong_buffer_length": 9}}
    assert parse(document | {"sampling": {"max_completion_length": 9}}).algorithm.overlong_buffer_length == 9
    with pytest.raises(ConfigError) as caught:
        parse(document | {"sampling": {"max_completion_length": 8}})
    wanted = "algorithm.overlong_buffer_length: value 9; allowed: null, or 1 to sampling.max_completion_length (8)"
    assert caught.value.problems == [wanted]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algorithm": {"filter_groups": True, "filter_groups_reward": "math"}},
            r"algorithm\.filter_groups_reward: value 'math'; allowed: null, or the name of a reward: 'arithmetic'$",
        ),
        (
            {"run": {"url": "memory://x", "num_prompts_per_step": 3}, "algorithm": {"num_mini_batches": 4}},
            r"algorithm\.num_mini_batches: value 4; allowed: 1 to run\.num_prompts_per_step \(3\)",
        ),
        (
            {"critic": {"warmup_iterations": 1}},
            r"critic: given; allowed with algorithm\.advantage_estimator 'grpo': nothing, because there is no critic",
        ),
        (
            {"pools": {"train": {"gpus": 4}}, "trainer": {"nproc_per_node": 8}},
            r"trainer\.nproc_per_node: value 8; allowed: 1 to pools\.train\.gpus \(4\), one for each GPU",
        ),
        (
            {"pools": {"rollout": {"count": 0, "count_min": 0}}},
            r"pools\.rollout\.count: value 0; allowed with planning\.seeding 'off': at least 1 in one pool of the crew",
        ),
        (
            {
                "rollout": {"engine": "vllm", "vllm": {"tensor_parallel_size": 4}},
                "pools": {"more_rollout": {"far": {"gpus": 2}}},
            },
            r"pools\.more_rollout\.far\.gpus: value 2; allowed: 0, or a multiple of rollout\.vllm\.tensor_parallel",
        ),
        (
            {
                "rollout": {"engine": "vllm", "vllm": {"tensor_parallel_size": 4}},
                "pools": {"train": {"gpus": 1}},
                "planning": {"seeding": "auto"},
            },
            r"pools\.train\.gpus: value 1; allowed: 0, or a multiple of",
        ),
        (
            {
                "planning": {"seeding": "auto"},
                "trainer": {"nproc_per_node": 2},
                "rollout": {"vllm": {"tensor_parallel_size": 2}},
            },
            r"rollout\.vllm\.tensor_parallel_size: value 2; allowed with planning\.seeding 'auto' and 2 processes",
        ),
        (
            {"rollout": {"vllm": {"max_lora_rank": 16}}, "lora": {"rank": 8}},
            r"rollout\.vllm\.max_lora_rank: value 16; allowed without lora\.publish 'adapter': null",
        ),
        (
            {"rollout": {"vllm": {"max_lora_rank": 16}}, "lora": {"rank": 17, "publish": "adapter"}},
            r"lora\.rank: value 17; allowed: 1 to rollout\.vllm\.max_lora_rank \(16\), or that null",
        ),
        *(
            (
                {"rollout": {"crew": "standing"}, "planning": planning},
                rf"planning\.{field}: value {value}; allowed with rollout\.crew 'standing': {allowed}, because",
            )
            for planning, field, value, allowed in (
                ({"width": "cost"}, "width", "'cost'", "'fixed'"),
                ({"objective": "gpu_seconds", "cut_share": 0.8}, "objective", "'gpu_seconds'", "'makespan'"),
                ({"usd_per_iteration_max": 2.5}, "usd_per_iteration_max", "2.5", "null"),
            )
        ),
    ],
)
def test_sections_that_do_not_go_together_are_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        parse(MINIMAL | sections)


def test_sections_that_go_together_are_not():
    config = parse(
        MINIMAL
        | {
            "algorithm": {"preset": "ppo", "num_mini_batches": 32},
            "critic": {"optimizer": {"betas": [0.9, 0.99]}},
            "pools": {"train": {"gpus": 8}},
            "trainer": {"nproc_per_node": 8, "nnodes": 2},
            "lora": {"rank": 8, "target_modules": ["q_proj"]},
        }
    )
    assert config.critic.optimizer.learning_rate == 1e-5
    assert (config.lora.alpha, config.lora.target_modules) == (64.0, ("q_proj",))
    assert digest(config) != digest(parse({**dump(config), "lora": None}))


@pytest.mark.parametrize("ttl_s", [1e-9, 0.002])
def test_members_that_would_write_heartbeats_without_a_pause_are_refused(ttl_s):
    with pytest.raises(ConfigError, match=r"rollout\.claim_ttl_s: .* given; .* 0\.003"):
        parse(MINIMAL | {"rollout": {"claim_ttl_s": ttl_s}})
