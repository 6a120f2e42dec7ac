"""verl's RayPPOTrainer with this project's rollouts: an agent loop manager and a checkpoint engine manager.

verl loads both by name from its configuration, and makes them in this order. The manager generates each batch with the
run's members. Weights come from verl's own checkpoint of each step, so verl and the run go on from the same step after
a kill. Written for verl 0.9.1 with trainer.use_v1 false; verl itself is not imported.
"""

import asyncio
import atexit
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from storage.errors import WrongInputError
from tasks.external.groups import Group
from tasks.external.handed_weights import folder_tensors
from tasks.external.rollouts import Rollouts, rollouts

_CONFIGURATION = "actor_rollout_ref.rollout.custom.gleaner"


class VerlMisfit(WrongInputError):  # noqa: N818 - reads as what happened
    """A setting of verl differs from the run's, or cannot be used with it."""


class AgentLoopManager:
    """Generates verl's batches; for actor_rollout_ref.rollout.agent.agent_loop_manager_class."""

    # The manager of this process, whose weights `CheckpointEngineManager` publishes.
    latest: ClassVar["AgentLoopManager | None"] = None

    def __init__(self, config: Any, source: Rollouts) -> None:
        """config: verl's. source: Rollouts of a run with data.source "submitted". Raises VerlMisfit."""
        _check(config, source)
        self._source = source
        self._rollout = config.actor_rollout_ref.rollout
        self._checkpoints = Path(config.trainer.default_local_dir)
        self._stack = ExitStack()
        self._is_open = False
        AgentLoopManager.latest = self

    @classmethod
    def create(cls, config: Any, *given: Any, **more: Any) -> Self:
        """The manager for verl's configuration; verl's servers, teachers and reward workers stay unused."""
        del given, more
        path = (config.actor_rollout_ref.rollout.get("custom") or {}).get("gleaner")
        if path is None:
            raise VerlMisfit(f"{_CONFIGURATION}: not given; allowed: the path of the run's configuration")
        return cls(config, rollouts(path))

    def generate_sequences(self, prompts: Any) -> Any:
        """The responses to a batch, in its order; each prompt stands there rollout.n times in a row.

        prompts: verl's DataProto with raw_prompt and uid, and global_steps in its meta_info.

        Returns a DataProto with B rows: int64 prompts [B, prompt_length], responses and response_mask
        [B, response_length], input_ids, attention_mask and position_ids over both, and float32 rollout_log_probs and
        rm_scores [B, response_length]; min_global_steps and max_global_steps are the versions that sampled. Raises
        VerlMisfit, and what `Rollouts` raises.
        """
        rows = prompts.non_tensor_batch
        if prompts.meta_info.get("validate") or "__do_sample__" in rows:
            raise VerlMisfit(
                "trainer.test_freq, trainer.val_before_train, algorithm.adv_estimator: a batch for validation or for a "
                "greedy baseline; allowed: -1, false, and every estimator but remax"
            )
        if not self._is_open:
            self._is_open = True
            self._stack.enter_context(self._source)
            # verl does not say when training has ended.
            atexit.register(self.close)
        step = int(prompts.meta_info["global_steps"]) - 1
        self.publish(step)
        self._source.submit(step, _distinct(rows, self._rollout.n))
        groups = sorted(self._source.next(step), key=lambda group: group.number)
        import torch  # noqa: PLC0415 - there where verl is

        arrays, non_tensors = self._padded(groups)
        return type(prompts).from_dict(
            tensors={name: torch.from_numpy(array) for name, array in arrays.items()},
            non_tensors={**non_tensors, "raw_prompt": rows["raw_prompt"]},
            meta_info={"timing": {}, "reward_extra_keys": []},
        )

    def publish(self, version: int) -> None:
        """Publish verl's checkpoint of a step as the version of that number, once; raises VerlMisfit."""
        if self._source.step != version - 1:
            return
        folder = self._checkpoints / f"global_step_{version}" / "actor" / "huggingface"
        if not any(folder.glob("*.safetensors")):
            raise VerlMisfit(
                f"trainer.save_freq: no weights in {folder}; allowed: 1, with 'hf_model' among "
                "actor_rollout_ref.actor.checkpoint.save_contents"
            )
        self._source.publish(folder_tensors(folder), step=version - 1)

    def close(self) -> None:
        """Let another program take the run at once."""
        self._stack.close()
        self._is_open = False

    def _padded(self, groups: Sequence[Group]) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]]]:
        """What becomes tensors, and what stays arrays."""
        width, length = self._rollout.prompt_length, self._rollout.response_length
        pairs = [(group, response) for group in groups for response in group.responses]
        size = len(pairs)
        prompts, both = np.zeros((size, width), np.int64), np.zeros((size, width + length), np.int64)
        responses, own = np.zeros((size, length), np.int64), np.zeros((size, length), np.int64)
        logprobs, scores = np.zeros((size, length), np.float32), np.zeros((size, length), np.float32)
        oldest, newest, images = (np.empty(size, dtype=object) for _ in range(3))
        turns = np.empty(size, np.int32)
        for row, (group, response) in enumerate(pairs):
            before, count = len(group.prompt_token_ids), len(response.token_ids)
            if before > width:
                raise VerlMisfit(f"prompt_length: value {width}; allowed here: at least {before}, as a prompt has")
            prompts[row, width - before :] = group.prompt_token_ids
            responses[row, :count] = response.token_ids
            both[row, width - before : width + count] = 1
            logprobs[row, :count] = response.token_logprobs
            if response.reward is not None:  # else its environment was lost, and nothing of it is trained
                own[row, :count] = response.policy_mask
            # verl's advantages are over all rows of a group.
            scores[row, count - 1] = group.mean_reward if response.reward is None else response.reward
            sampled = response.weight_versions
            oldest[row], newest[row] = int(sampled.min(initial=group.step)), int(sampled.max(initial=0))
            # Turns of the policy, and what each of them answers.
            turns[row] = 2 * np.count_nonzero(np.diff(response.policy_mask.astype(np.int8), prepend=0) == 1)
            images[row] = {}
        return {
            "prompts": prompts,
            "responses": responses,
            "response_mask": own,
            "input_ids": np.concatenate([prompts, responses], axis=1),
            "attention_mask": both,
            "position_ids": np.maximum(both.cumsum(axis=1) - 1, 0),
            "rollout_log_probs": logprobs,
            "rm_scores": scores,
        }, {
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "__num_turns__": turns,
            "multi_modal_inputs": images,
        }


class CheckpointEngineManager:
    """Publishes the weights after each step; for actor_rollout_ref.rollout.checkpoint_manager_class."""

    def __init__(self, config: Any, actor_wg: Any, replicas: Sequence[Any]) -> None:
        """replicas: verl's own servers, which sleep throughout."""
        del config, actor_wg
        self._replicas = replicas

    def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Publish the weights after so many steps; raises VerlMisfit."""
        if AgentLoopManager.latest is None:
            raise VerlMisfit(
                "agent_loop_manager_class: another class; allowed with this checkpoint_manager_class: ours"
            )
        if global_steps:
            AgentLoopManager.latest.publish(global_steps)
        return {}

    def sleep_replicas(self) -> None:
        """Let verl's own servers give their memory back."""

        async def sleep() -> None:
            await asyncio.gather(*(replica.sleep() for replica in self._replicas))

        asyncio.run(sleep())


def _check(config: Any, source: Rollouts) -> None:
    rollout, run = config.actor_rollout_ref.rollout, source.config
    for name, theirs, field, ours in (
        ("actor_rollout_ref.rollout.n", rollout.n, "run.num_generations", run.run.num_generations),
        (
            *("actor_rollout_ref.rollout.response_length", rollout.response_length),
            *("sampling.max_completion_length", run.sampling.max_completion_length),
        ),
        (
            "actor_rollout_ref.rollout.temperature",
            rollout.temperature,
            "sampling.temperature",
            run.sampling.temperature,
        ),
        # verl's top_k is -1 where none is.
        ("actor_rollout_ref.rollout.top_k", max(0, rollout.get("top_k") or 0), "sampling.top_k", run.sampling.top_k),
        ("actor_rollout_ref.rollout.top_p", rollout.get("top_p", 1), "sampling.top_p", run.sampling.top_p),
        ("trainer.save_freq", config.trainer.save_freq, "this manager", 1),
        ("trainer.critic_warmup", config.trainer.critic_warmup, "this manager", 0),
    ):
        if theirs != ours:
            raise VerlMisfit(f"{name}: value {theirs} in verl's configuration; allowed with {field}: {ours}")
    if not run.rewards:
        raise VerlMisfit("rewards: value []; allowed with verl: at least one, because verl takes graded responses")


def _distinct(rows: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """One prompt of each group, with the columns that reward functions of verl's form read."""
    uids = list(rows["uid"])
    starts = range(0, len(uids), size)
    if len(uids) % size or any(len(set(uids[start : start + size])) != 1 for start in starts):
        raise VerlMisfit(f"uid: a batch of {len(uids)} rows; allowed: each prompt {size} times in a row (rollout.n)")
    found = []
    for start in starts:
        row: dict[str, Any] = {"prompt": list(rows["raw_prompt"][start])}
        row |= {name: rows[name][start] for name in ("data_source", "extra_info") if name in rows}
        if "reward_model" in rows:
            row["ground_truth"] = rows["reward_model"][start].get("ground_truth")
        found.append(row)
    return found
