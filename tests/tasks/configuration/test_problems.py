import json

import pytest

from tasks.configuration.other_names import OTHER_NAMES
from tasks.configuration.problems import names_at
from tasks.configuration.run_config import ConfigError, RunConfig, parse
from tests.tasks.configuration.test_run_config import MINIMAL, with_value


def problems_of(document):
    with pytest.raises(ConfigError) as caught:
        parse(document)
    return caught.value.problems


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("algorithm.epsilon", "clip_ratio_low"),
        ("algorithm.epsilon_high", "clip_ratio_high"),
        ("algorithm.num_iterations", "num_epochs"),
        ("algorithm.loss_type", "loss_agg_mode"),
        ("algorithm.adv_estimator", "advantage_estimator"),
        ("algorithm.norm_adv_by_std_in_grpo", "scale_rewards"),
        ("algorithm.lam", "gae_lambda"),
        ("algorithm.kl_loss_coef", "kl_coef"),
        ("algorithm.clip_ratio", "clip_ratio_low"),
        ("data.train_batch_size", "run.num_prompts_per_step"),
        ("data.max_response_length", "sampling.max_completion_length"),
        ("actor_rollout_ref", "policy"),
        ("optimizer.lr", "learning_rate"),
        ("num_generations", "run.num_generations"),
        ("run.temperature", "sampling.temperature"),
        ("algorithm.learning_rate", None),
        ("run.sede", "seed"),
        ("rewards.0.wieght", "weight"),
        ("pools.more_rollout.far.cuont", "count"),
        ("pools.more_rollout.far.trace_pth", "trace_path"),
    ],
)
def test_the_hint_names_the_field_that_is_meant(path, meant):
    document = json.loads(json.dumps(MINIMAL))
    node = document
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    for parent in parents:
        node = node[parent] if isinstance(parent, int) else node.setdefault(parent, {})
    node[last] = 1
    [problem] = problems_of(document)
    if meant is not None:
        assert problem == f"{path}: unknown field; did you mean {meant!r}?"
    assert problem.startswith(f"{path}: unknown field; ")


@pytest.mark.parametrize("path", sorted(set(OTHER_NAMES.values())))
def test_every_other_name_is_of_a_field_that_exists(path):
    *section, name = path.split(".")
    assert name in names_at(RunConfig, tuple(section))


# "beta" is kl_coef in TRL's GRPOConfig, and another field in its DPOConfig, as here.
@pytest.mark.parametrize("name", sorted(OTHER_NAMES.keys() - {"beta"}))
def test_no_other_name_is_one_of_ours_in_the_same_section(name):
    *section, _ = OTHER_NAMES[name].split(".")
    assert name not in names_at(RunConfig, tuple(section))


@pytest.mark.parametrize(
    "reward", [{}, {"function": 7}, {"function": "no such"}, {"function": "math", "wieght": 1}, 7, None]
)
def test_a_wrong_reward_is_one_problem(reward):
    [problem] = problems_of(MINIMAL | {"rewards": [reward]})
    assert problem.startswith("rewards.0")


def test_no_reward_is_a_problem_of_its_own():
    [problem] = problems_of(MINIMAL | {"rewards": []})
    assert problem.startswith("rewards: [] given; ")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"x", "tracking.name: \"b'x'\" given; allowed: text, a number, true, false, null"),
        ({1, 2}, "tracking.name: "),
        ("\ud83d", 'tracking.name: "\\ud83d" given; allowed: text without lone surrogates'),
        pytest.param(10**6000, "tracking.name: an integer of 19932 bits given; allowed: integers of up to", id="long"),
        ({b"k": 1}, "tracking.name: the key \"b'k'\" given; allowed: text"),
        ({True: 1}, "tracking.name: the key true given; allowed: text"),
        ("x" * 10_000, None),
        (["x"] * 10_000, 'tracking.name: ["x", '),
    ],
)
def test_values_that_json_cannot_hold_are_named(value, shown):
    document = with_value("tracking.name", value)
    if shown is None:
        assert parse(document).tracking.name == value
        return
    [problem] = problems_of(document)
    assert problem.startswith(shown)
    assert len(problem) < 400


def test_a_document_that_holds_itself_is_refused():
    document = dict(MINIMAL)
    document["tracking"] = document
    assert problems_of(document) == ["it is nested too deeply"]


def test_every_field_that_is_still_to_fill_in_is_named_at_once_beside_what_else_is_wrong():
    document = {
        "run": {"url": "???", "seed": -1},
        "policy": {"path": "p", "revision": "???"},
        "data": {"source": "???"},
        "rewards": [{"function": "m:f", "arguments": {"pattern": "???"}}, "???", {"function": "???", "weight": "???"}],
        "turns": {"tools": "???", "environment": "???"},
        "optimizer": {"schedule": "linear", "total_steps": "???", "betas": [2, 0.9]},
        "lora": "???",
    }
    with pytest.raises(ConfigError) as caught:
        parse(document)
    waiting = ["run.url", "policy.revision", "data.source", "rewards.1", "rewards.2.function", "rewards.2.weight"]
    waiting += ["turns.tools", "turns.environment", "optimizer.total_steps", "lora"]
    assert caught.value.problems[: len(waiting)] == [f"{field}: ??? given; fill it in" for field in waiting]
    rest = [problem.partition(":")[0] for problem in caught.value.problems[len(waiting) :]]
    assert rest == ["run.seed", "optimizer.betas.0"]


def test_a_reward_functions_own_arguments_may_hold_any_text():
    document = {"run": {"url": "u"}, "policy": {"path": "p"}, "data": {"source": "rows.jsonl"}}
    rewards = [{"function": "m:f", "arguments": {"pattern": "???", "more": [{"a": "???"}]}}]
    assert parse(document | {"rewards": rewards}).rewards[0].arguments == rewards[0]["arguments"]
