"""The work-conserving bound: all work that must be done, over all GPUs that are there.

No order of work and no hand-over does better. What must be done is to decode every token once, at the rate of the
batch and the engine that take the fewest GPU-seconds for it; to prefill every prompt once; and to train on every token
once. The GPUs that are there are the trainer's, and those of every machine that the trace has for a pool, used or not,
as far as the pool may take so many at a time.
Training has the trainer's GPUs only, so that iterations take at least as long as their training.
"""

from dataclasses import dataclass

from tasks.crew_model.step_time import StepTime
from tasks.forecasting.availability import changes
from tasks.forecasting.results import SimulatedRun
from tasks.forecasting.scenario import PoolScenario, Scenario
from tasks.forecasting.simulate import POOL_SEEDS


@dataclass(frozen=True, kw_only=True)
class WorkBound:
    """A run from its beginning to its last conclusion, so that no work of its iterations is outside.

    needed_gpu_s: what must be done; there_gpu_s: GPU-seconds of all machines that were there; train_s: seconds of
    training; duration_s: of the run, with so many iterations.
    """

    iterations: int
    needed_gpu_s: float
    there_gpu_s: float
    train_s: float
    duration_s: float

    @property
    def least_s(self) -> float:
        """The least time in which GPUs as many as there were could have done the work."""
        return max(self.duration_s * self.needed_gpu_s / self.there_gpu_s, self.train_s)

    @property
    def reached(self) -> float:
        """The least time over the time that the run took: 1 at the bound, and never more."""
        return self.least_s / self.duration_s


def work_bound(given: Scenario, lived: SimulatedRun, seed: int) -> WorkBound:
    """The bound of a run that was simulated with this seed and has ended at least one iteration."""
    trainer, work, count = given.trainer, given.work, len(lived.iterations)
    train_s = lived.tokens * trainer.train_s_per_token + count * trainer.train_fixed_s
    prompts = count * work.num_prompts_per_step * work.prompt_tokens
    decode, prefill = _gpu_s_per_token(given)
    there = [_there_s(pool, lived.duration_s, seed + POOL_SEEDS * number) * pool.gpus
             for number, pool in enumerate(given.pools)]  # fmt: skip
    return WorkBound(
        iterations=count,
        needed_gpu_s=lived.tokens * decode + prompts * prefill + train_s * trainer.gpus,
        there_gpu_s=trainer.gpus * lived.duration_s + sum(there),
        train_s=train_s,
        duration_s=lived.duration_s,
    )


def _gpu_s_per_token(given: Scenario) -> tuple[float, float]:
    """The fewest GPU-seconds for a decoded token, and for one of a prompt, on any engine that is there."""
    engines = [(pool.gpus, pool.step_time, pool.responses_max, pool.prefill_tokens_per_s) for pool in given.pools]
    if given.trainer.engines:
        trainer = given.trainer
        gpus = trainer.gpus / trainer.engines
        engines.append((gpus, trainer.step_time, trainer.responses_max, trainer.prefill_tokens_per_s))
    decode = min(gpus * _least_s_per_token(step_time, most) for gpus, step_time, most, _ in engines)
    return decode, min(gpus / prefill for gpus, _, _, prefill in engines)


def _least_s_per_token(step_time: StepTime, responses_max: int) -> float:
    table = step_time.table(responses_max)
    return min(float(table[batch]) / batch for batch in range(1, responses_max + 1))


def _there_s(pool: PoolScenario, duration_s: float, seed: int) -> float:
    """Machine-seconds that the pool's places had, of at most `count` at a time, from second 0 on."""
    up, since_s, total_s = 0, 0.0, 0.0
    for at_s, _, there in changes(pool.availability, pool.places or pool.count, seed):
        if at_s >= duration_s:
            break
        total_s += min(up, pool.count) * (at_s - since_s)
        up, since_s = up + (1 if there else -1), at_s
    return total_s + min(up, pool.count) * (duration_s - since_s)
