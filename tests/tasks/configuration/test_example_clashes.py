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
        (
            {"trainer": {"placement": "standing"}},
            "trainer.placement: value 'standing'; allowed with algorithm.kind 'sft': 'own' or 'pod', because",
        ),
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


PAIRS = EXAMPLES | {"algorithm": {"kind": "dpo"}}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"algorithm": {"kind": "dpo", "label_smoothing": 0.5}}, "algorithm.label_smoothing: value 0.5; allowed with"),
        ({"algorithm": {"kind": "dpo", "beta": 0}}, "algorithm.beta: 0 given; input should be greater than 0"),
        (
            {"algorithm": {"kind": "dpo", "loss_agg_mode": "seq-mean-token-mean"}},
            "algorithm.loss_agg_mode: value 'seq-mean-token-mean'; allowed with kind 'dpo': 'token-mean', because",
        ),
        ({"algorithm": {"kind": "dpo", "kl_coef": 0.1}}, "algorithm.kl_coef: value 0.1; allowed with kind 'dpo': 0.0"),
        ({"rewards": [{"function": "math"}]}, "rewards: given; allowed with algorithm.kind 'dpo': nothing, because"),
        (
            {"data": {"source": "rows.jsonl", "completion_column": "answer"}},
            'data.completion_column: value "answer"; allowed: "completion", unless it is of a run with',
        ),
    ],
)
def test_what_means_nothing_for_pairs_is_refused_in_one_line(sections, problem):
    with pytest.raises(ConfigError) as caught:
        parse(PAIRS | sections)
    [line] = caught.value.problems
    assert line.startswith(problem)


def test_a_run_on_pairs_survives_a_round_trip_and_needs_a_reference():
    algorithm = {"kind": "dpo", "beta": 0.2, "rpo_alpha": 1, "label_smoothing": 0.1, "num_epochs": 2}
    config = parse(PAIRS | {"algorithm": algorithm, "data": {"source": "rows.jsonl", "chosen_column": "better"}})
    assert parse(dump(config)) == parse_held(dump(config)) == config
    assert config.algorithm.needs_reference
    assert (config.algorithm.aggregation, config.algorithm.streams) == ("seq-mean-token-sum", False)
    assert len({digest(parse(PAIRS | {"algorithm": algorithm | {"beta": beta}})) for beta in (0.1, 0.2)}) == 2


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
        ({"algorithm": {"kind": "kto"}}, "algorithm.kind: \"kto\" given; input should be 'rl', 'sft' or 'dpo'"),
        (
            {"algorithm": {"beta": 0.2}},
            "algorithm.beta: value 0.2; allowed with kind 'rl': 0.1, because nothing reads it; did you mean kl_",
        ),
        ({"algorithm": {"rpo_alpha": 1}}, "algorithm.rpo_alpha: value 1.0; allowed with kind 'rl': 0.0, because"),
        (
            {"data": {"source": "rows.jsonl", "rejected_column": "worse"}},
            'data.rejected_column: value "worse"; allowed: "rejected", unless it is of a run with algorithm.kind \'dpo',
        ),
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
    assert not {"kind", "label_smoothing", "beta", "rpo_alpha"} & identity(config)["algorithm"].keys()
    assert not {"completion_column", "chosen_column", "rejected_column"} & identity(config)["data"].keys()
    assert digest(parse(EXAMPLES)) != digest(config)
