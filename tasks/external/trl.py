"""TRL's trainers with this project's rollouts: `GRPOTrainer(..., rollout_func=gleaner.trl.rollout_func(config))`.

`asynchronous` is for AsyncGRPOTrainer. GRPOTrainer asks for the completions of a batch of prompts. The batch is a step
of the run: the weights of TRL's model are published as the step's version, the prompts are submitted, and the groups
come from the run's members. TRL computes rewards, advantages and the update. Written for TRL 1.16; only the trainer
that TRL hands over is used.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.external.groups import Group
from tasks.external.rollouts import Rollouts, rollouts
from tasks.external.trl_worker import TrlMisfit, asynchronous, same_settings

__all__ = ["REWARD", "RolloutFunc", "TrlMisfit", "asynchronous", "rollout_func", "run_rewards"]
# The column of TRL's batch with the rewards of the run.
REWARD = "run_reward"


class RolloutFunc:
    """What TRL calls for completions; it belongs to one trainer, and ends with TRL's training."""

    def __init__(self, source: Rollouts) -> None:
        """source: Rollouts of a run with data.source "submitted"."""
        self._source = source
        self._is_open = False

    @property
    def url(self) -> str:
        """The run's directory, for `gleaner join`."""
        return self._source.url

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """The completions of TRL's batch, one for each of its prompts.

        Returns lists with an item for each prompt: prompt_ids and completion_ids (token ids), logprobs (float, 0 at
        tokens that an environment added), env_mask (1 for tokens of the policy), and REWARD. Raises TrlMisfit, and
        what `Rollouts` raises.
        """
        step = self._step(trainer)
        if not self._is_open:
            self._open(trainer)
        if self._source.step == step - 1:
            self._source.publish(_weights(trainer), step=step - 1)
        distinct = _distinct(prompts, self._source.config.run.num_generations)
        self._source.submit(step, distinct)
        groups = sorted(self._source.next(step), key=lambda group: group.number)
        return _completions(groups)

    def finish(self, trainer: Any) -> None:
        """Publish the weights with which TRL's training ended, and release the run; called at that end."""
        if not self._is_open:
            return
        self._is_open = False
        with self._source:
            last = self._source.step
            if last < math.ceil(trainer.state.global_step / _every(trainer)):
                self._source.publish(_weights(trainer), step=last)

    def _step(self, trainer: Any) -> int:
        done, every = trainer.state.global_step, _every(trainer)
        if not trainer.model.training:
            raise TrlMisfit("eval_strategy: TRL asks for completions to evaluate; allowed with rollout_func: 'no'")
        return int(done // every)

    def _open(self, trainer: Any) -> None:
        """Compare the settings of TRL with the run's, and learn of the end of TRL's training."""
        same_settings(trainer, self._source.config)
        if trainer.accelerator.num_processes != 1:
            raise TrlMisfit(
                f"accelerate: {trainer.accelerator.num_processes} processes; allowed with rollout_func: 1, because a "
                "step is one batch of one process"
            )
        tools = getattr(trainer, "tools", None)
        if tools:
            raise TrlMisfit(
                f"tools, environment_factory: {len(tools)} tools in TRL; allowed with rollout_func: none, because TRL "
                "would generate the later turns itself; the section turns of the run has tools and environments"
            )
        trainer.add_callback(_ending(self, trainer))
        self._source.__enter__()
        self._is_open = True


def rollout_func(config: Mapping[str, Any] | str | Path) -> RolloutFunc:
    """TRL's `rollout_func` that generates with the members of a run.

    config: The run's configuration, with trainer.placement "external" and data.source "submitted". Raises ConfigError,
    and TrlMisfit if a program does not give the run its prompts.
    """
    return RolloutFunc(rollouts(config))


def run_rewards(completions: Sequence[Any], **columns: Any) -> list[float]:
    """A reward function for TRL: the rewards by the run's functions; a failed response has its group's mean."""
    del completions
    found: list[float] = columns[REWARD]
    return found


def _every(trainer: Any) -> int:
    """The optimizer steps from one batch of completions to the next."""
    arguments = trainer.args
    steps = arguments.steps_per_generation * arguments.num_iterations
    if steps % arguments.gradient_accumulation_steps:
        raise TrlMisfit(
            f"steps_per_generation: value {arguments.steps_per_generation}; allowed with rollout_func: a multiple of "
            f"gradient_accumulation_steps ({arguments.gradient_accumulation_steps}) / num_iterations"
        )
    return int(steps // arguments.gradient_accumulation_steps)


def _weights(trainer: Any) -> dict[str, Any]:
    found: dict[str, Any] = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return found


def _distinct(prompts: Sequence[Any], size: int) -> list[Any]:
    """One prompt of each group; TRL repeats each prompt for the responses of its group."""
    groups = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    for number, group in enumerate(groups):
        if len(group) != size or any(each != group[0] for each in group):
            raise TrlMisfit(
                f"prompts: group {number} of TRL's batch of {len(prompts)} is not one prompt {size} times; allowed: "
                "a batch of whole groups (per_device_train_batch_size * steps_per_generation)"
            )
    return [group[0] for group in groups]


def _completions(groups: Sequence[Group]) -> dict[str, Any]:
    pairs = [(group, response) for group in groups for response in group.responses]
    return {
        "prompt_ids": [list(group.prompt_token_ids) for group, _ in pairs],
        "completion_ids": [response.token_ids.tolist() for _, response in pairs],
        "logprobs": [response.token_logprobs.tolist() for _, response in pairs],
        "env_mask": [
            [int(own and response.reward is not None) for own in response.policy_mask] for _, response in pairs
        ],
        # TRL takes None for 0, and its advantages are over all responses of a group.
        REWARD: [group.mean_reward if response.reward is None else response.reward for group, response in pairs],
    }


def _ending(source: RolloutFunc, trainer: Any) -> Any:
    """A callback of transformers that finishes `source` when TRL's training ends."""
    from transformers import TrainerCallback  # noqa: PLC0415 - there where TRL is

    class Ending(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *given: Any, **more: Any) -> None:
            del given, more
            source.finish(trainer)

    return Ending()
