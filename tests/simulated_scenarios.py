"""Small scenarios whose figures can be worked out by hand, for tests of the simulator."""

from dataclasses import replace

from tasks.configuration.planning import PlanningConfig
from tasks.forecasting.scenario import (
    LengthsScenario,
    Policy,
    PoolScenario,
    Scenario,
    TrainerScenario,
    WorkScenario,
)

STEP_S = ((1, 0.01), (8, 0.01), (64, 0.05))


def a_pool(count: int, **changes) -> PoolScenario:
    pool = PoolScenario(
        count=count,
        usd_per_h=3.6,
        responses_max=16,
        step_s=STEP_S,
        prefill_tokens_per_s=1e4,
        link_gbps=8.0,
    )
    return replace(pool, **changes)


def a_trainer(**changes) -> TrainerScenario:
    trainer = TrainerScenario(
        engines=0,
        usd_per_h=36.0,
        gpus=8.0,
        responses_max=16,
        step_s=STEP_S,
        prefill_tokens_per_s=1e4,
        train_s_per_token=0.001,
        train_fixed_s=2.0,
        micro_batch_responses=4,
    )
    return replace(trainer, **changes)


def some_lengths(**changes) -> LengthsScenario:
    return replace(LengthsScenario(median=200.0, sigma=0.7, cap=2000), **changes)


def all_alike(tokens: int) -> LengthsScenario:
    return LengthsScenario(quantiles=((0.0, float(tokens)), (1.0, float(tokens))), cap=tokens)


def a_scenario(
    *pools: PoolScenario,
    trainer: TrainerScenario | None = None,
    lengths: LengthsScenario | None = None,
    groups: int = 8,
    generations: int = 4,
    iterations: int = 3,
    planning: PlanningConfig | None = None,
    **policy,
) -> Scenario:
    return Scenario(
        name="test",
        pools=pools,
        trainer=trainer or a_trainer(),
        work=WorkScenario(
            num_prompts_per_step=groups,
            num_generations=generations,
            prompt_tokens=100,
            lengths=lengths or some_lengths(),
            iterations=iterations,
        ),
        policy=Policy(planning=planning or PlanningConfig(), weights_bytes=1e9, **policy),
    )
