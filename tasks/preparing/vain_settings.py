"""Settings that are allowed and hardly meant: nothing is learned, held out or saved with them, or GPUs stand idle."""

from collections.abc import Iterator
from dataclasses import replace

from resources.pools import pool_path
from tasks.configuration.data import DataConfig
from tasks.configuration.run_config import RunConfig


def settings_in_vain(config: RunConfig) -> list[str]:
    """A doubt about each vain setting, with the name of the field."""
    found = (_teaching_nothing, _not_held_out, _idle_gpus, _idle_gpus_of_scorers, _saving_nothing)
    return [line for doubts in found for line in doubts(config)]


def _teaching_nothing(config: RunConfig) -> Iterator[str]:
    if config.optimizer.learning_rate == 0:
        yield "optimizer.learning_rate: value 0; every weight version is the pretrained model; expected: above 0"
    if config.rewards and not any(reward.weight for reward in config.rewards):
        yield "rewards: every weight is 0, and so is every reward; expected: another weight for at least one"
    if config.sampling.temperature == 0:
        yield (
            "sampling.temperature: value 0; all responses to a prompt are the same, so none is better than the others; "
            "expected: above 0 (evaluation.sampling may have 0)"
        )


def _not_held_out(config: RunConfig) -> Iterator[str]:
    if config.evaluation is None:
        return
    if _same_prompts(config.data) == _same_prompts(config.evaluation.data):
        yield "evaluation.data: the prompts of training (data), of which none is held out; expected: other prompts"


def _same_prompts(data: DataConfig) -> DataConfig:
    """The settings that decide the set of prompts, with the settings of order and use made equal."""
    return replace(data, shuffle=True, max_prompt_length=None, allow=())


def _idle_gpus(config: RunConfig) -> Iterator[str]:
    """A member has a single engine, so GPUs of a slot beyond tensor_parallel_size are paid for and stand idle."""
    used = config.rollout.vllm.tensor_parallel_size
    for name, pool in config.pools.rollout_pools.items():
        if pool.gpus > used and config.rollout.engine in ("vllm", "auto"):
            yield (
                f"{pool_path(name)}.gpus: value {pool.gpus}, of which a member uses "
                f"rollout.vllm.tensor_parallel_size ({used}); expected: as many, and more slots (count)"
            )


def _idle_gpus_of_scorers(config: RunConfig) -> Iterator[str]:
    teacher = config.teacher
    if teacher is None or teacher.pool is None:
        return
    gpus, is_vllm = config.pools.named(teacher.pool).gpus, teacher.engine == "vllm"
    used = teacher.vllm.tensor_parallel_size if is_vllm else 1
    if gpus > used:
        by = f"teacher.vllm.tensor_parallel_size ({used})" if is_vllm else "one with teacher.engine torch"
        yield (
            f"pools.scoring.{teacher.pool}.gpus: value {gpus}, of which a scorer uses {by}; expected: as many, and "
            "more scorers (count)"
        )


def _saving_nothing(config: RunConfig) -> Iterator[str]:
    if config.trainer.offload == "optimizer" and not config.pools.train.gpus:
        yield "trainer.offload: value 'optimizer'; pools.train has no GPU whose memory it would save; expected: none"
