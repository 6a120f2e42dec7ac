"""TRL's side of the contract, by an object with what TRL's trainer has; and TRL itself where it is installed."""

from types import SimpleNamespace

import pytest
import torch

import gleaner
from tasks.external.rollouts import Rollouts
from tasks.external.trl import REWARD, RolloutFunc, TrlMisfit, run_rewards
from tests.external_program import arrays, process_dies, settings, versions
from tests.small_run import roll_out

SUBMITTED = {"data": {"source": "submitted"}, "retention": {"keep_weights": 9}}
STEPS = {"steps_per_generation": 2, "num_iterations": 1, "gradient_accumulation_steps": 2}
PROMPTS = [["1+1=", "2+2="], ["3+3=", "4+4="], ["5+5=", "6+6="]]


class Rolled(Rollouts):
    """Rollouts whose members have generated before the groups are asked for."""

    def next(self, step):
        groups = super().next(step)
        roll_out(self.url, step)
        return groups


class Model(torch.nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = {name: torch.tensor(array) for name, array in weights.items()}

    def state_dict(self):
        return self.weights


def trainer_of(model, step=0, **changes):
    """What the adapter uses of TRL's GRPOTrainer."""
    arguments = SimpleNamespace(**STEPS, min_p=None, generation_kwargs=None)
    given = {
        "args": arguments,
        "state": SimpleNamespace(global_step=step),
        "model": model,
        "num_generations": 3,
        "max_completion_length": 40,
        "temperature": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "accelerator": SimpleNamespace(num_processes=1, unwrap_model=lambda wrapped: wrapped),
        "callbacks": (callbacks := []),
        "add_callback": callbacks.append,
    }
    return SimpleNamespace(**(given | changes))


def batch(step):
    return [prompt for prompt in PROMPTS[step] for _ in range(3)]


@pytest.fixture
def given(tmp_path, model):
    return settings(str(tmp_path / "run"), model, **SUBMITTED)


def first_model(given):
    with Rollouts(given) as rollouts:
        rollouts.submit(0, PROMPTS[0])
    return Model(arrays(given.run.url, 0))


def test_each_batch_is_a_step_whose_version_is_the_trainer_s_model(given):
    model = first_model(given)
    source, trainer = RolloutFunc(Rolled(given)), trainer_of(model)
    for step in range(2):
        trainer.state.global_step = step
        found = source(batch(step), trainer)
        assert [len(found[name]) for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", REWARD)] == [
            6
        ] * 5
        for ids, logprobs, mask in zip(found["completion_ids"], found["logprobs"], found["env_mask"], strict=True):
            assert len(ids) == len(logprobs) == len(mask)
            assert set(mask) == {1}
        assert run_rewards([], **found) == found[REWARD]
        for tensor in model.weights.values():
            tensor.add_(0.01)
    trainer.state.global_step = 2
    [callback] = trainer.callbacks
    callback.on_train_end(None, None, None)
    run = gleaner.open(given.run.url)
    assert list(run.iterations) == [0, 1]
    assert len(versions(given.run.url)) == 3
    newest = arrays(given.run.url, 2)
    assert all((newest[name] == tensor.numpy()).all() for name, tensor in model.weights.items())


def test_a_trainer_that_is_started_again_gets_the_same_completions_and_publishes_once(given):
    model = first_model(given)
    first, trainer = RolloutFunc(Rolled(given)), trainer_of(model)
    seen = [first(batch(0), trainer)]
    for tensor in model.weights.values():
        tensor.add_(0.01)
    trainer.state.global_step = 1
    seen.append(first(batch(1), trainer))
    # The trainer's own checkpoint is of step 0.
    process_dies()
    again = trainer_of(Model(arrays(given.run.url, 0)))
    second = RolloutFunc(Rolled(given))
    before = versions(given.run.url)
    assert second(batch(0), again) == seen[0]
    again.state.global_step = 1
    assert second(batch(1), again) == seen[1]
    assert versions(given.run.url) == before


@pytest.mark.parametrize(
    ("changes", "prompts", "line"),
    [
        (
            {"num_generations": 4},
            batch(0),
            "num_generations: value 4 in TRL's configuration; allowed with run.num_generations: 3",
        ),
        ({"temperature": 0.5}, batch(0), "temperature: value 0.5"),
        ({"top_p": 0.9}, batch(0), r"top_p: value 0.9 .* allowed with sampling.top_p: 1.0"),
        ({"top_k": 50}, batch(0), r"top_k: value 50 .* allowed with sampling.top_k: 0"),
        (
            {"args": SimpleNamespace(**STEPS, min_p=0.1)},
            batch(0),
            r"min_p: value 0.1 .* allowed with the run's sampling, which has none: 0",
        ),
        ({"repetition_penalty": 1.1}, batch(0), "repetition_penalty: value 1.1"),
        (
            {"args": SimpleNamespace(**STEPS, generation_kwargs={"seed": 1})},
            batch(0),
            "generation_kwargs: value {'seed",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            batch(0),
            r"chat_template_kwargs: value .* allowed with data.chat_template_kwargs: {}",
        ),
        ({"accelerator": SimpleNamespace(num_processes=2)}, batch(0), "accelerate: 2 processes; allowed"),
        ({"tools": [print]}, batch(0), "tools, environment_factory: 1 tools in TRL; allowed with rollout_func: none"),
        ({}, batch(0)[:-1], "group 1 of TRL's batch of 5 is not one prompt 3 times"),
        ({}, ["a", "b", "c"], "group 0 of TRL's batch of 3"),
        ({"model": SimpleNamespace(training=False)}, batch(0), "eval_strategy"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(given, changes, prompts, line):
    with pytest.raises(TrlMisfit, match=line):
        RolloutFunc(Rolled(given))(prompts, trainer_of(**{"model": first_model(given), **changes}))
