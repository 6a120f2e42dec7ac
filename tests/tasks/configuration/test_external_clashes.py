"""A trainer outside the project has settings of its own, so ours are refused."""

import pytest

from tasks.configuration.run_config import ConfigError, parse
from tests.small_run import document

EXTERNAL = {"trainer": {"placement": "external"}, "optimizer": {"learning_rate": 1e-6}}


def parsed(**sections):
    return parse(document("memory://external", "model", **{**EXTERNAL, **sections}))


def test_a_run_of_an_external_trainer_may_have_no_rewards_and_submitted_prompts():
    config = parsed(rewards=[], data={"source": "submitted"}, algorithm={"max_staleness": 2})
    assert (config.rewards, config.trainer.is_external) == ((), True)


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"optimizer": {"learning_rate": 0.1}}, r"optimizer\.learning_rate: value 0\.1; allowed with .*: 1e-06"),
        ({"algorithm": {"kl_coef": 0.1}}, r"algorithm\.kl_coef: value 0\.1; allowed with .*because the trainer has"),
        ({"lora": {"rank": 2}}, "lora: given; allowed with"),
        ({"planning": {"seeding": "auto"}}, "because the trainer's machines are not of this run"),
        ({"trainer": {"placement": "own"}, "data": {"source": "submitted"}}, r"data\.source: value 'submitted'"),
        ({"trainer": {"placement": "own"}, "rewards": []}, "rewards"),
    ],
)
def test_a_setting_of_our_own_trainer_is_refused(sections, line):
    with pytest.raises(ConfigError, match=line):
        parsed(**sections)
