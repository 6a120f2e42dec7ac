"""The section `evaluation`: what is refused, what names the outcome, and that nothing of it changes the run."""

from typing import Any

import pytest

from tasks.configuration.evaluation import settings, settings_digest
from tasks.configuration.run_config import ConfigError, digest, dump, parse

RUN = {
    "run": {"url": "memory://x"},
    "policy": {"path": "/m"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "arithmetic"}],
}


def config(**evaluation):
    return parse({**RUN, "evaluation": {"data": {"source": "arithmetic", "seed": 7}, **evaluation}})


def named(settled):
    return settings_digest(settings(settled.evaluation, settled.rewards))


@pytest.mark.parametrize(
    ("evaluation", "problem"),
    [
        (
            {"num_generations": 4, "sampling": {"temperature": 0}},
            "num_generations: value 4; allowed with sampling.temp",
        ),
        ({"rewards": []}, "rewards: [] given;"),
        ({"intervall": 1}, "intervall: unknown field; did you mean 'interval'?"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature: unknown field; did you mean 'temperature'?"),
        ({"interval": -1}, "interval: -1 given;"),
    ],
)
def test_what_is_refused(evaluation, problem):
    with pytest.raises(ConfigError) as caught:
        config(**evaluation)
    [line] = caught.value.problems
    assert line.startswith(f"evaluation.{problem}")


def test_data_must_be_said():
    with pytest.raises(ConfigError, match=r"evaluation\.data: missing; it has no default"):
        parse({**RUN, "evaluation": {}})


@pytest.mark.parametrize(
    ("n", "k"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))]
)
def test_k_takes_the_powers_of_two_below_the_number_of_responses_and_that_number(n, k):
    settled = config(num_generations=n)
    assert settled.evaluation.k == k
    assert settings(settled.evaluation, settled.rewards)["k"] == list(k)


def test_an_evaluation_is_no_part_of_the_runs_identity():
    assert digest(config()) == digest(parse(RUN)) == digest(config(interval=3, num_generations=4))


def test_an_evaluation_from_before_ids_of_the_hub_keeps_its_name():
    reward = {"function": "reward_model", "model": "/judge"}
    settled = config(data={"source": "held_out.parquet"}, rewards=[reward])
    found = settings(settled.evaluation, settled.rewards, {"reward_model": "0" * 32})
    # As the last version wrote it that knew neither data.subset nor revision.
    assert settings_digest(found) == "a9e710bcfabb15577cf7f9844a6d1ded"
    young: list[dict[str, Any]] = [
        {},
        {"subset": "c"},
        {"revision": "d"},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ]
    assert len({named(config(data={"source": "a/b", **one})) for one in young}) == len(young)
    # What is accepted of the prompts changes none of them.
    assert named(config(data={"source": "a/b", "allow": ["two_bos"]})) == named(config(data={"source": "a/b"}))


def test_an_evaluation_from_before_special_tokens_could_be_kept_keeps_its_name():
    skipped = config(sampling={"skip_special_tokens": True})
    assert "skip_special_tokens" not in settings(skipped.evaluation, skipped.rewards)["sampling"]
    assert named(skipped) == named(config())
    assert named(config(sampling={"skip_special_tokens": False})) != named(config())


def test_it_survives_its_way_to_the_tasks():
    settled = config(num_generations=4, rewards=[{"function": "math"}], interval=2)
    assert parse(dump(settled)) == settled


@pytest.mark.parametrize(
    "change",
    [
        {"num_generations": 2},
        {"sampling": {"temperature": 0}},
        {"data": {"source": "arithmetic", "seed": 8}},
        {"rewards": [{"function": "math"}]},
    ],
)
def test_the_digest_names_all_that_decides_the_outcome(change):
    assert named(config(**change)) != named(config())


def test_when_and_where_it_is_done_is_not_in_the_digest():
    assert named(config(interval=5)) == named(config())
    pools = parse({**RUN, "evaluation": {"data": {"seed": 7}}, "pools": {"rollout": {"count": 9}}})
    assert named(pools) == named(config())
    assert named(config(rewards=[{"function": "arithmetic"}])) == named(config())  # said twice: the run's
    assert len(named(config())) == 32


@pytest.mark.parametrize(("interval", "due"), [(0, set()), (1, {0, 1, 2, 3, 4}), (2, {0, 2, 4})])
def test_which_versions_training_evaluates(interval, due):
    assert {version for version in range(5) if config(interval=interval).evaluation.is_due(version)} == due


def test_where_and_how_long_a_reward_runs_is_not_what_it_says():
    judge = {"function": "reward_model", "model": "/a"}
    same = [{"model": "/b"}, {"time_limit_s": 9.0}]
    assert {named(config(rewards=[judge | change])) for change in same} == {named(config(rewards=[judge]))}
    assert named(config(rewards=[judge | {"dtype": "bfloat16"}])) != named(config(rewards=[judge]))


def test_the_content_of_a_reward_model_stands_where_its_path_was():
    settled = config(rewards=[{"function": "reward_model", "model": "/a", "name": "judge"}, {"function": "math"}])
    resolved = settings(settled.evaluation, settled.rewards, {"judge": "0" * 32})
    assert [reward["model"] for reward in resolved["rewards"]] == ["0" * 32, None]
    assert settings_digest(resolved) != named(settled)


def sampled(evaluation=None, **run):
    settled = parse({**RUN, "sampling": run, "evaluation": {"data": {"source": "arithmetic"}, **(evaluation or {})}})
    assert parse(dump(settled)) == settled
    return settled.evaluation.sampling


def test_an_evaluation_samples_as_training_does_unless_it_says_otherwise():
    assert sampled(max_completion_length=64, top_p=0.9) == sampled(
        {"sampling": {}}, max_completion_length=64, top_p=0.9
    )
    own = sampled({"sampling": {"temperature": 0}}, max_completion_length=64, temperature=0.7)
    assert (own.max_completion_length, own.temperature) == (64, 0.0)


def test_an_evaluation_of_a_run_that_gives_no_sampling_keeps_its_name():
    """As versions without inheritance wrote it."""
    assert named(config()) == "b64cd781a51cfb63de4781a058018991"


@pytest.mark.parametrize(
    ("run", "own", "problems"),
    [
        ({"temperature": -1}, {}, ["sampling.temperature: -1 given"]),
        ({"temprature": 1}, {}, ["sampling.temprature: unknown field"]),
        ({"temperature": -1}, {"top_k": -1}, ["sampling.temperature: -1 given", "evaluation.sampling.top_k: -1 given"]),
        ({}, 7, ["evaluation.sampling: 7 given"]),
        (7, {}, ["sampling: 7 given"]),
    ],
)
def test_what_is_inherited_is_no_second_problem(run, own, problems):
    with pytest.raises(ConfigError) as caught:
        parse({**RUN, "sampling": run, "evaluation": {"data": {"source": "arithmetic"}, "sampling": own}})
    assert [line[: len(start)] for line, start in zip(caught.value.problems, problems, strict=True)] == problems
