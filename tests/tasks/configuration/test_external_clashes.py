"""A trainer outside the project has settings of its own, so ours are refused."""

import pytest

from tasks.configuration.run_config import ConfigError, parse
from tests.small_run import document

EXTERNAL = {"trainer": {"placement": "external"}, "optimizer": {"learning_rate": 1e-6}}
SUBMITTED = {"data": {"source": "submitted"}}
HELD_OUT = {"data": {"source": "held_out.jsonl"}}


def submitted(**fields):
    return {"data": {"source": "submitted", **fields}}


def parsed(**sections):
    return parse(document("memory://external", "model", **{**EXTERNAL, **sections}))


def test_a_run_of_an_external_trainer_may_have_no_rewards_and_submitted_prompts():
    config = parsed(rewards=[], data={"source": "submitted"}, algorithm={"max_staleness": 2})
    assert (config.rewards, config.trainer.is_external) == ((), True)


def test_what_a_program_that_records_groups_reads_may_be_given():
    trainer = {"device": "cpu", "micro_batch_tokens_max": 64, "group_timeout_s": 1.0}
    assert parsed(trainer={**EXTERNAL["trainer"], **trainer}).trainer.micro_batch_tokens_max == 64


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"optimizer": {"learning_rate": 0.1}}, r"optimizer\.learning_rate: value 0\.1; allowed with .*: 1e-06"),
        ({"algorithm": {"kl_coef": 0.1}}, r"algorithm\.kl_coef: value 0\.1; allowed with .*because the trainer has"),
        ({"trainer": {**EXTERNAL["trainer"], "nnodes": 2}}, r"trainer\.nnodes: value 2; allowed with .*: 1, because"),
        (
            {"trainer": {**EXTERNAL["trainer"], "dtype": "bfloat16"}},
            r'trainer\.dtype: value "bfloat16"; allowed with .*: "float32", because the trainer has its own',
        ),
        ({"lora": {"rank": 2}}, "lora: given; allowed with"),
        ({"planning": {"seeding": "auto"}}, "because the trainer's machines are not of this run"),
        ({"trainer": {"placement": "own"}, "data": {"source": "submitted"}}, r"data\.source: value 'submitted'"),
        ({"trainer": {"placement": "own"}, "rewards": []}, "rewards"),
        ({"teacher": {"path": "teacher"}}, r"teacher: given; allowed with trainer\.placement 'external': nothing"),
        ({"run": {"from": "memory://other@2", "from_optimizer": True}}, r"run\.from_optimizer: value true; allowed"),
        ({"rewards": [], "evaluation": HELD_OUT}, r"evaluation\.rewards: value null; allowed without rewards"),
        ({"evaluation": {"data": {"source": "submitted"}}}, r"evaluation\.data\.source: value 'submitted'"),
        (SUBMITTED | {"algorithm": {"filter_groups": True}}, r"algorithm\.filter_groups: value true"),
        (submitted(limit=3), r"data\.limit: value 3; allowed with data\.source 'submitted': null"),
        (submitted(replay={"runs": ["memory://other@0:1"]}), r"data\.replay: given; allowed with data\.source"),
        (
            submitted(**{"from": "memory://other", "pass_rate": [0, 0.5]}),
            r"data\.from: value .*; allowed with data\.source 'submitted': null(.|\n)*data\.pass_rate: value",
        ),
    ],
)
def test_a_setting_of_our_own_trainer_is_refused(sections, line):
    with pytest.raises(ConfigError, match=line):
        parsed(**sections)
