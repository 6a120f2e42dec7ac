"""The inputs about the scorers of `teacher.pool`: their machines, and the speed of the teachers' forward passes."""

import statistics
from collections.abc import Sequence

from resources.model_size import ModelSize
from resources.pools import SCORING, PoolConfig
from tasks.configuration.teacher import TeacherConfig
from tasks.forecasting.engine_estimate import train_s_per_token
from tasks.forecasting.engine_inputs import device
from tasks.forecasting.known_facts import KnownFacts
from tasks.forecasting.scorers import ScorersScenario
from tasks.forecasting.trainer_inputs import LINK_GBPS, SCORING_FLOPS


def scorers_scenario(facts: KnownFacts, teachers: Sequence[ModelSize]) -> ScorersScenario | None:
    """The scorers of the configuration; None without `teacher.pool`.

    teachers: sizes as far as known. Raises LookupError for a machine or an accelerator that is not known.
    """
    teacher = facts.config.teacher
    if teacher is None or teacher.pool is None:
        return None
    name = teacher.pool
    pool = facts.config.pools.scoring[name]
    price = "configured (usd_per_hour)" if pool.usd_per_hour is not None else f"price table, {pool.machine}"
    facts.show(f"{name}: price", f"{pool.price_usd_per_h:.2f} $/h of each of {pool.count} scorers", price)
    return ScorersScenario(
        name=name,
        count=pool.count,
        usd_per_h=pool.price_usd_per_h,
        gpus=float(pool.gpus),
        start_s=0.0 if facts.in_turn else facts.config.forecast.start_s,
        process_s=sum(each.bytes for each in teachers) * 8 / 1e9 / LINK_GBPS if pool.gpus else 0.0,
        score_s_per_token=_score_s_per_token(facts, name, pool, teachers),
    )


def _score_s_per_token(facts: KnownFacts, name: str, pool: PoolConfig, teachers: Sequence[ModelSize]) -> float:
    machine = device(f"{SCORING}{name}", pool, min(_gpus_used(facts.config.teacher), pool.gpus))
    if machine is None or not teachers:
        missing = "no teacher's size is known" if machine is not None else f"pools.scoring.{name}.gpus is 0"
        facts.show(f"{name}: scoring", "unknown: left out of time", missing)
        return 0.0
    # A response has one of the teachers; the prompt is read with every response.
    each = statistics.fmean(train_s_per_token(teacher, machine, SCORING_FLOPS) for teacher in teachers)
    found = each * (facts.config.forecast.prompt_tokens + facts.mean) / facts.mean
    source = f"estimated: {SCORING_FLOPS:g} operations per parameter of {'a' if len(teachers) > 1 else 'the'} teacher "
    source += f"and token, {machine.gpus} x {machine.accelerator.name} at {machine.mfu:.0%}"
    facts.show(f"{name}: scoring", f"{1 / found:.0f} generated tokens/s of each scorer", source)
    return found


def _gpus_used(teacher: TeacherConfig | None) -> int:
    """How many GPUs of its machine a scorer uses: with torch it is one process."""
    return teacher.vllm.tensor_parallel_size if teacher is not None and teacher.engine == "vllm" else 1
