"""The settings of a run on examples: those without a meaning are refused, each in one line."""

import pytest

from tasks.configuration.run_config import ConfigError, digest, dump, identity, parse, parse_held

RUN = {"url": "memory://examples"}
EXAMPLES = {
    "run": RUN,
    "policy": {"path": "model"},
    "data": {"source": "rows.jsonl"},
    "algorithm": {"kind": "sft"},
}
SAMPLED = EXAMPLES | {"algorithm": {}, "rewards": [{"function": "math"}]}
HELD_OUT = {"data": {"source": "held_out.jsonl"}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"rewards": []},
        {"algorithm": {"kind": "sft", "label_smoothing": 0.1, "num_epochs": 2, "loss_agg_mode": "seq-mean-token-mean"}},
        {"data": {"source": "rows.jsonl", "prompt_column": "messages", "completion_column": None}},
        {"sampling": {"max_completion_length": 64}},
        {"evaluation": HELD_OUT | {"rewards": [{"function": "math"}]}},
    ],
)
def test_a_run_on_examples_needs_no_rewards_and_survives_a_round_trip(sections):
    config = parse(EXAMPLES | sections)
    assert config.algorithm.learns_examples
    assert config.in_plan_order
    assert parse(dump(config)) == parse_held(dump(config)) == config


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"rewards": [{"function": "math"}]}, "rewards: given; allowed with algorithm.kind 'sft': nothing, because"),
        ({"turns": {"tools": ["m:f"]}}, "turns: given; allowed with algorithm.kind 'sft': nothing, because"),
        ({"run": RUN | {"num_generations": 4}}, "run.num_generations: value 4; allowed with algorithm.kind 'sft': "),
        ({"rollout": {"crew": "standing"}}, "rollout.crew: value 'standing'; allowed with algorithm.kind 'sft': "),
        ({"sampling": {"temperature": 0.5}}, "sampling.temperature: value 0.5; allowed with algorithm.kind 'sft': 1.0"),
        (
            {"planning": {"seeding": "auto"}},
            'planning.seeding: value "auto"; allowed with algorithm.kind \'sft\': "off"',
        ),
        (
            {"data": {"source": "rows.jsonl", "continue_final_message": True}},
            "data.continue_final_message: value true; allowed with algorithm.kind 'sft': false",
        ),
        ({"evaluation": HELD_OUT}, "evaluation.rewards: value null; allowed with algorithm.kind 'sft': at least one"),
        (
            {
                "evaluation": {
                    "data": {"source": "a.jsonl", "completion_column": None},
                    "rewards": [{"function": "math"}],
                }
            },
            'evaluation.data.completion_column: value null; allowed: "completion", unless',
        ),
        *(
            (
                {"algorithm": {"kind": "sft", name: value}},
                f"algorithm.{name}: value {shown}; allowed with kind 'sft': {default}, because nothing reads it",
            )
            for name, value, shown, default in [
                ("advantage_estimator", "rloo", "'rloo'", "'grpo'"),
                ("policy_loss", "no such", "'no such'", "'clip'"),
                ("kl_coef", 0.1, "0.1", "0.0"),
                ("clip_ratio_high", 0.2, "0.2", "0.28"),
                ("importance_sampling", "token", "'token'", "'auto'"),
                ("filter_groups", True, "true", "false"),
                ("mask_truncated", True, "true", "false"),
                ("max_staleness", 1, "1", "0"),
            ]
        ),
    ],
)
def test_what_means_nothing_for_examples_is_refused_in_one_line(sections, problem):
    with pytest.raises(ConfigError) as caught:
        parse(EXAMPLES | sections)
    [line] = caught.value.problems
    assert line.startswith(problem)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"algorithm": {"label_smoothing": 0.1}},
            "algorithm.label_smoothing: value 0.1; allowed with kind 'rl': 0.0, ",
        ),
        (
            {"data": {"source": "rows.jsonl", "completion_column": "answer"}},
            'data.completion_column: value "answer"; allowed: "completion", unless it is of a run with',
        ),
        ({"algorithm": {"kind": "dpo"}}, "algorithm.kind: \"dpo\" given; input should be 'rl' or 'sft'"),
    ],
)
def test_what_means_something_for_examples_alone_is_refused_without_them(sections, problem):
    with pytest.raises(ConfigError) as caught:
        parse(SAMPLED | sections)
    [line] = caught.value.problems
    assert line.startswith(problem)


def test_a_run_that_samples_still_needs_rewards():
    with pytest.raises(ConfigError) as caught:
        parse({name: value for name, value in SAMPLED.items() if name != "rewards"} | {"lora": {"rank": 0}})
    assert "rewards: missing; it has no default" in caught.value.problems
    assert len(caught.value.problems) == 2


def test_the_identity_of_a_run_that_samples_says_nothing_of_examples():
    config = parse(SAMPLED)
    assert not {"kind", "label_smoothing"} & identity(config)["algorithm"].keys()
    assert "completion_column" not in identity(config)["data"]
    assert digest(parse(EXAMPLES)) != digest(config)
