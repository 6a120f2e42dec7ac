"""TRL's AsyncGRPOTrainer with this project's rollouts: `AsyncGRPOTrainer(..., **gleaner.trl.asynchronous(config))`.

TRL trains while members generate. `RolloutWorker` makes TRL's samples of finished groups, with the run's rewards, and
publishes the weights that TRL would send to a vLLM server. A step of the run is what TRL trains between two weight
syncs. Written for TRL 1.16, whose server, ports and process group stay unused.
"""

import queue
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import WrongInputError
from tasks.configuration.data import SUBMITTED
from tasks.configuration.run_config import RunConfig
from tasks.external.groups import Group
from tasks.external.rollouts import Rollouts, rollouts

# TRL's own, when it divides rewards by their standard deviation.
_STD_EPS = 1e-8
# What TRL does without a setting that may be null, or that older versions lack.
_OFF: Mapping[str, Any] = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "generation_kwargs": {},
    "chat_template_kwargs": {},
}


class TrlMisfit(WrongInputError):  # noqa: N818 - reads as what happened
    """A setting of TRL's trainer differs from the run's, or cannot be used with it."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutSample:
    """A response as TRL's trainer reads it, which has a class with these fields.

    Attributes:
        prompt: Chat messages.
        completion: One message of the assistant.
        input_ids: int64 [n], the prompt and the response.
        completion_mask: int64 [n], 1 for tokens of the policy.
        old_log_probs: float32 [n], of the policy's tokens at sampling, else 0.
        advantage: The reward less the group's mean, over the group's standard deviation; 0 without a reward.
        model_version: The oldest version that sampled a token, by TRL's count.
        group_id: A number of the group that no other group of the run has.
        metrics: The response's reward and the group's standard deviation, for TRL's log.
        enqueued_at: None, because a sample does not wait in a queue.
    """

    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    old_log_probs: npt.NDArray[np.float32]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


class _Pulled(queue.Queue[RolloutSample]):
    """A queue whose items are made when TRL asks for them, in TRL's thread, so that errors reach TRL."""

    def __init__(self, make: Callable[[], RolloutSample]) -> None:
        super().__init__()
        self._make = make

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """The next sample; waits for it until trainer.group_timeout_s, whatever TRL asks for."""
        del block, timeout
        return self._make()


class RolloutWorker:
    """What TRL calls `rollout_worker` and `weight_transfer`, in one; belongs to one trainer."""

    def __init__(self, source: Rollouts) -> None:
        """source: Rollouts of a run that draws its prompts. Raises TrlMisfit if TRL cannot train what the run makes."""
        if source.follows:
            raise TrlMisfit(
                f"config: {source.url}, which an execution plans; allowed with gleaner.trl.asynchronous: the run's "
                "configuration, because an execution records a step after the weights of the step before"
            )
        _check_run(source.config)
        self._source = source
        self._stack = ExitStack()
        self._stream: Iterator[RolloutSample] = iter(())
        self.rollout_buffer: queue.Queue[RolloutSample] = _Pulled(lambda: next(self._stream))
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        # TRL's optimizer steps: those of a step of the run, and those that are done.
        self._every = 1
        self._done = 0
        # What TRL's count of versions is ahead of the run's.
        self._offset = 0

    @property
    def url(self) -> str:
        """The run's directory, for `gleaner join`."""
        return self._source.url

    def check(self, arguments: Any) -> None:
        """Compare AsyncGRPOConfig with the run; raises TrlMisfit for the first difference."""
        config = self._source.config
        same_settings(arguments, config)
        self._every = arguments.weight_sync_steps
        staleness = config.algorithm.max_staleness
        whole = config.run.num_prompts_per_step * config.run.num_generations
        batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        for name, value, is_right, allowed in (
            (
                *("token_budget", arguments.token_budget, arguments.token_budget == 0),
                "0, because a step is a number of samples",
            ),
            (
                *("max_staleness", arguments.max_staleness, arguments.max_staleness >= staleness),
                f"at least algorithm.max_staleness ({staleness}), so that no sample is dropped",
            ),
            ("accelerate", f"{arguments.world_size} processes", arguments.world_size == 1, "1"),
            (
                "per_device_train_batch_size * gradient_accumulation_steps * weight_sync_steps",
                *(batch * self._every, batch * self._every == whole),
                f"run.num_prompts_per_step * run.num_generations ({whole}), a step of the run",
            ),
        ):
            if not is_right:
                raise TrlMisfit(f"{name}: value {value} in TRL's configuration; allowed: {allowed}")

    def begin(self, done: int) -> None:
        """Open the run; TRL's training begins, or goes on after `done` optimizer steps."""
        self._done = done
        self._stack.enter_context(self._source)

    def follow(self, done: int) -> None:
        """Learn that TRL has done so many optimizer steps."""
        self._done = done

    def start(self) -> None:
        """Begin to hand out the samples that follow TRL's state."""
        batch = self._source.config.run.num_prompts_per_step * self._source.config.run.num_generations // self._every
        step, part = divmod(self._done, self._every)
        self._stream = self._stack.enter_context(closing(self._samples(step, part * batch)))

    def stop(self) -> None:
        """Release the run."""
        self._stack.close()

    def update_model_version(self, model_version: int) -> None:
        """Learn TRL's count of versions, which begins anew with each process."""
        self._offset = model_version - self._done // self._every

    def check_health(self, stale_after_s: float) -> None:
        """Nothing: the queue itself raises when members give no sign of life."""

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Publish TRL's weights as the version after a step, unless an earlier life of the program has."""
        tensors = dict(iterator)
        step, part = divmod(self._done, self._every)
        if not part and self._source.step == step - 1:
            self._source.publish(tensors, step=step - 1)

    def init_weight_transfer(self) -> None:
        """Nothing: versions go over the object store."""

    def pause(self) -> None:
        """Nothing: members go on, and each response names its versions."""

    def resume(self) -> None:
        """Nothing, as `pause`."""

    def destroy(self) -> None:
        """Nothing: `stop` releases the run."""

    def _samples(self, first: int, skipped: int) -> Generator[RolloutSample]:
        """The samples from a step on, without the `skipped` that TRL has trained of it."""
        size = self._source.config.run.num_prompts_per_step
        for step in count(first):
            samples = (
                sample
                for group in self._source.next(step)
                for sample in _samples_of(group, step * size + group.number, self._offset)
            )
            yield from islice(samples, skipped, None)
            skipped = 0


def asynchronous(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The arguments with which TRL's AsyncGRPOTrainer trains on the rollouts of a run.

    They are rollout_worker, weight_transfer and callbacks; callbacks of your own go into that list.

    config: The run's configuration, with trainer.placement "external", prompts, rewards, and algorithm.max_staleness of
    at least 1. Raises ConfigError, and TrlMisfit if TRL cannot train what the run makes.
    """
    worker = RolloutWorker(rollouts(config))
    return {"rollout_worker": worker, "weight_transfer": worker, "callbacks": [_following(worker)]}


def same_settings(theirs: Any, config: RunConfig) -> None:
    """Raise TrlMisfit for a setting of sampling or of prompts that TRL has with another value than the run.

    theirs: An object with TRL's num_generations, max_completion_length and temperature. What else it has of TRL's
    settings, itself or as `args`, is compared, too, because the run's members would not read it.
    """
    sampling, none = config.sampling, "the run's sampling, which has none"
    ours: dict[str, tuple[str, Any]] = {
        "num_generations": ("run.num_generations", config.run.num_generations),
        "max_completion_length": ("sampling.max_completion_length", sampling.max_completion_length),
        "temperature": ("sampling.temperature", sampling.temperature),
        "top_p": ("sampling.top_p", sampling.top_p),
        "top_k": ("sampling.top_k", sampling.top_k),
        "min_p": (none, 0),
        "repetition_penalty": (none, 1),
        "generation_kwargs": (none, {}),
        "chat_template_kwargs": ("data.chat_template_kwargs", config.data.chat_template_kwargs),
    }
    for name, (field, allowed) in ours.items():
        # As given: TRL's trainer has another generation_kwargs than its arguments.
        value = getattr(getattr(theirs, "args", None), name, getattr(theirs, name, _OFF.get(name, allowed)))
        if value is None or (name == "top_k" and value == -1):
            value = _OFF.get(name)
        if value != allowed:
            raise TrlMisfit(f"{name}: value {value} in TRL's configuration; allowed with {field}: {allowed}")


def _check_run(config: RunConfig) -> None:
    for name, value, is_right, allowed in (
        ("data.source", config.data.source, config.data.source != SUBMITTED, "prompts that the run draws"),
        ("rewards", [], bool(config.rewards), "at least one, because TRL's trainer takes graded samples"),
        (
            *("algorithm.max_staleness", config.algorithm.max_staleness, config.algorithm.max_staleness >= 1),
            "at least 1, because TRL takes the first samples of a step before it hands over the weights for them",
        ),
        ("data.replay", "given", config.data.replay is None, "null, because TRL counts versions of this run alone"),
    ):
        if not is_right:
            raise TrlMisfit(f"{name}: value {value!r}; allowed with gleaner.trl.asynchronous: {allowed}")


def _samples_of(group: Group, group_id: int, offset: int) -> Iterator[RolloutSample]:
    rewards = [response.reward for response in group.responses]
    scored = np.array([reward for reward in rewards if reward is not None])
    mean, std = (float(scored.mean()), float(scored.std())) if scored.size else (0.0, 0.0)
    prompt = [{"role": "user", "content": group.prompt}] if isinstance(group.prompt, str) else group.prompt
    before = len(group.prompt_token_ids)
    for response, reward in zip(group.responses, rewards, strict=True):
        yield RolloutSample(
            prompt=prompt,
            completion=[{"role": "assistant", "content": response.completion}],
            input_ids=np.concatenate([np.array(group.prompt_token_ids, np.int64), response.token_ids]),
            completion_mask=np.concatenate([np.zeros(before, np.int64), response.policy_mask.astype(np.int64)]),
            old_log_probs=np.concatenate([np.zeros(before, np.float32), response.token_logprobs]),
            advantage=0.0 if reward is None else (reward - mean) / (std + _STD_EPS),
            model_version=int(response.weight_versions.min(initial=group.step)) + offset,
            group_id=group_id,
            metrics={"reward": float("nan") if reward is None else reward, "reward_std": std},
        )


def _following(worker: RolloutWorker) -> Any:
    """A callback of transformers that tells the worker TRL's settings and steps."""
    from transformers import TrainerCallback  # noqa: PLC0415 - there where TRL is

    class Following(TrainerCallback):  # type: ignore[misc]
        def on_init_end(self, args: Any, *given: Any, **more: Any) -> None:
            del given, more
            worker.check(args)

        def on_train_begin(self, args: Any, state: Any, *given: Any, **more: Any) -> None:
            del args, given, more
            worker.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, *given: Any, **more: Any) -> None:
            del args, given, more
            worker.follow(state.global_step)

    return Following()
