"""What a run whose own trainer stands cannot have, and what it leaves as it is."""

import pytest

from tasks.configuration.run_config import ConfigError, changes, digest, parse

MINIMAL = {
    "run": {"url": "memory://x"},
    "policy": {"path": "model"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "arithmetic"}],
}
JUDGED = [{"function": "reward_model", "model": "/models/rm"}]


def with_trainer(trainer, **sections):
    return MINIMAL | {"trainer": {"placement": "standing"} | trainer} | sections


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            with_trainer({"fleet": "s3://bucket/fleet"}),
            "trainer.fleet: value 's3://bucket/fleet'; allowed with {}: null",
        ),
        (with_trainer({}, planning={"seeding": "auto"}), "planning.seeding: value 'auto'; allowed with {}: off"),
        (with_trainer({}, rewards=JUDGED), "rewards.0.model: given; allowed with {}: no reward model"),
        (with_trainer({"nnodes": 2}), "trainer.nnodes: value 2; allowed with {}: 1"),
        (
            with_trainer({"nproc_per_node": 2}, pools={"train": {"gpus": 8}}),
            "trainer.nproc_per_node: value 2; allowed with {}: pools.train.gpus (8)",
        ),
        (with_trainer({}, run={"url": "runs/../mine"}), "run.url: value 'runs/../mine'; allowed with {}: no part '.'"),
    ],
)
def test_what_a_standing_trainer_cannot_have_is_refused_in_one_line(document, message):
    with pytest.raises(ConfigError) as caught:
        parse(document)
    said = message.format("trainer.placement 'standing'")
    [line] = [line for problem in caught.value.problems for line in problem.splitlines() if said in line]
    assert line.startswith(said)


def test_it_may_be_chosen_for_a_run_that_goes_on():
    before, after = parse(MINIMAL), parse(with_trainer({}))
    assert digest(before) == digest(after)
    assert changes(before, after) == []


def test_its_phase_begins_with_the_first_group_whatever_the_algorithm_needs():
    assert parse(with_trainer({})).phase_start_share == 0
    assert parse(with_trainer({}, algorithm={"preset": "ppo"})).phase_start_share == 0


@pytest.mark.parametrize(
    ("url", "fleet"), [("s3://b/run", "s3://b/run/standing"), ("runs/mine/", "runs/mine/standing")]
)
def test_its_fleet_lies_in_the_run(url, fleet):
    config = parse(with_trainer({}, run={"url": url}))
    assert config.trainer.fleet_of(config.run.url) == fleet
    assert parse(MINIMAL).trainer.fleet_of(url) is None
