"""The look of a plan at the held-out prompts and rewards of an evaluation, once for each section `evaluation`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from storage.records.run import next_iteration, plans_in_flight, read_plan, read_run
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig, dump
from tasks.evaluation.measure import evaluation_of, rewards_of
from tasks.grading.run_rewards import held_models
from tasks.preparing.checks import check_held_out
from tasks.preparing.local_inputs import LocalInputs
from tasks.prompts.tokenise import Tokenizer


def doubts_of_evaluation(
    store: ObjectStore,
    local: RunConfig,
    inputs: LocalInputs,
    model_dir: Path,
    tokenizer: Callable[[], Tokenizer],
    *,
    is_new: bool,
) -> list[str]:
    """Doubts about the section `evaluation`, if training evaluates and no earlier plan has looked at an equal section.

    local: the configuration with local paths. Raises what `check_held_out` raises.
    """
    evaluates = local.evaluation is not None and local.evaluation.interval > 0
    if not evaluates or (not is_new and _is_known(store, local)):
        return []
    looked_at = replace(local, evaluation=inputs.evaluation(evaluation_of(local)))
    return check_held_out(looked_at, model_dir, tokenizer(), held_models(store, *rewards_of(looked_at)))[1]


def _is_known(store: ObjectStore, config: RunConfig) -> bool:
    """Whether the section `evaluation` equals the section in the last plan, or without plans in run.json."""
    current = next_iteration(store)
    plans = plans_in_flight(store) or [read_plan(store, iteration) for iteration in (current - 1,) if iteration >= 0]
    known = plans[-1].config if plans else read_run(store).config
    return bool(known.get("evaluation") == dump(config)["evaluation"])
