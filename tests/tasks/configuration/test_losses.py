import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.iteration_config import settings_of
from tasks.configuration.losses import LOSS_OPTIONS, LOSSES, loss_of
from tasks.configuration.run_config import digest, identity, parse
from tasks.learning.policy_losses import LossInputs
from tests.tasks.configuration.test_estimators import MINIMAL

GUIDE = Path(__file__).parents[3] / "docs/guide/algorithms.md"


@pytest.mark.parametrize("name", LOSSES)
def test_a_row_of_the_table_and_its_function_agree(name):
    row = LOSSES[name]
    parameters = set(inspect.signature(row.load()).parameters)
    assert parameters <= {field.name for field in fields(LossInputs)}
    assert parameters & LOSS_OPTIONS == row.reads
    assert AlgorithmConfig(policy_loss=name, loss_agg_mode="seq-mean-token-mean").loss is row


def test_the_guide_has_a_row_for_every_loss():
    table = GUIDE.read_text(encoding="utf-8").partition("## Policy losses")[2].partition("\n### ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))
    del rows["policy_loss"]
    assert set(rows) == set(LOSSES)
    for name, loss in LOSSES.items():
        assert set(re.findall(r"`(\w+)`", rows[name].split("|")[1])) == loss.reads


def test_an_own_loss_reads_every_bound_and_is_part_of_what_a_run_is():
    own = {"policy_loss": "tests.own_losses:clipped", "clip_ratio_low": 0.1, "clip_ratio_c": 2.0}
    assert AlgorithmConfig(**own).loss.reads == LOSS_OPTIONS
    config = parse(MINIMAL | {"algorithm": own})
    assert identity(config)["algorithm"]["policy_loss"] == own["policy_loss"]
    # No setting of an execution may name it.
    assert "algorithm" not in settings_of(config)
    assert digest(parse(MINIMAL)) == digest(parse(MINIMAL | {"algorithm": {"policy_loss": "clip"}}))


@pytest.mark.parametrize("name", ["ppo", "tests.own_losses", "tests/own_losses.py:clipped", ""])
def test_a_name_that_is_neither_of_the_table_nor_a_function_is_refused(name):
    with pytest.raises(ValueError, match=r"^policy_loss: value .*; allowed: 'clip', 'gspo', 'cispo', 'reinforce', or"):
        AlgorithmConfig(policy_loss=name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.no_such_module:clipped", "importing it raises ModuleNotFoundError"),
        ("tests.own_losses:no_such", "has no 'no_such'"),
        ("tests.own_losses:of_two_arguments", "its parameters do not fit: missing a required argument: 'more'"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(name, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        loss_of(name).check()
    assert str(refused.value).startswith(
        f"algorithm.policy_loss: value '{name}'; allowed: a function of one LossInputs"
    )
    assert "\n" not in str(refused.value)
