"""What `plan` refuses before it creates anything; `gleaner check` calls the same functions."""

from collections.abc import Collection, Sequence
from pathlib import Path

from resources.model_config import model_fields
from storage import model_files
from storage.paths import expanded
from storage.prompt_table import PromptRow
from storage.telling import Tell, untold
from tasks.configuration.data import ARITHMETIC
from tasks.configuration.run_config import RunConfig
from tasks.evaluation.held_out import check_number, draw_held_out, load_held_out
from tasks.grading.grader import check_rewards
from tasks.learning.pretrained import ModelError, check_model
from tasks.preparing.adapter_fit import check_targets
from tasks.preparing.at_hand import all_at_hand, inputs_at_hand
from tasks.preparing.engine_fit import check_engine_fits
from tasks.preparing.tools import openings, prompt_tokenizer
from tasks.prompts.draw import draw_prompts, prompts_at
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptSet
from tasks.prompts.tokenise import Tokenizer
from tasks.sampling.engines.choose import context_length


def check_settings(config: RunConfig) -> None:
    """The checks that open no file of the user's but the price table; raises LookupError and ValueError."""
    config.pools.check_prices()
    config.tracking.check_libraries()
    if config.turns is not None and config.data.source == ARITHMETIC:
        raise ValueError(
            f"data.source: value {ARITHMETIC!r}, whose prompts are text; allowed with turns: a file or a directory "
            "whose prompts are chat messages"
        )
    evaluation = config.evaluation
    if evaluation is not None and evaluation.interval and evaluation.data.source == ARITHMETIC:
        check_number(evaluation, load_prompts(evaluation.data))


def check_files(config: RunConfig, tell: Tell = untold) -> list[str]:
    """Open everything that the configuration names, as the first plan of a run does; writes nothing.

    Returns a line about each thing that was looked at. Raises ModelError, EngineMisfit, AdapterMisfit, PromptError,
    GradingError, EngineError, ToolsUnusable, HubError and ValueError.
    """
    with inputs_at_hand() as inputs:
        local = all_at_hand(config, inputs)
        pinned = [f"{name}: {found.repo} at commit {found.commit}" for name, found in inputs.found.items()]
        return [*pinned, *_look_at(local, config, tell)]


def _look_at(config: RunConfig, written: RunConfig, tell: Tell) -> list[str]:
    tell("looking at the model", 0, 0)
    directory = model_directory(config)
    doubts = check_engine_fits(config, directory)
    check_targets(config, directory, model_fields(directory))
    config.algorithm.estimator.check(with_turns=config.turns is not None)
    tell("reading prompts, and trying the rewards", 0, 0)
    prompts = load_prompts(config.data)
    check_rewards(config.rewards, prompts.columns, prompts=prompts)
    tokenizer = prompt_tokenizer(config, directory)
    tell(f"tokenising {len(prompts):,} prompts", 0, 0)
    rows = draw(config, prompts, tokenizer, directory, first=0, count=len(prompts))
    seen = [
        f"model: the configuration, the tokenizer and the headers of the weights in {directory}",
        f"advantage estimator: {config.algorithm.advantage_estimator}",
        f"rewards: {', '.join(reward.function for reward in config.rewards)}",
        f"prompts: {_described(rows)} of {written.data.source}",
    ]
    if config.turns is not None:
        tell("opening an environment, or an agent", 0, 0)
        first = openings(config, prompts_at(prompts, config.data, 0, 1), config.run.seed, 0)
        draw(config, prompts, tokenizer, directory, first=0, count=1, openings=first)
        if config.turns.agent is not None:
            seen.append(f"turns: the first request of {config.turns.agent}, and the chat template with its tools")
        else:
            reset = f", and a reset of {config.turns.environment}" if first else ""
            seen.append(f"turns: the tools and their schemas, the chat template with tools{reset}")
    if written.evaluation is not None:
        tell("looking at the evaluation", 0, 0)
        rows = check_held_out(config, directory, tokenizer)
        seen.append(f"evaluation: {_described(rows)} of {written.evaluation.data.source}, and its rewards")
    return [*seen, *(f"not sure: {doubt}" for doubt in doubts)]


def model_directory(config: RunConfig) -> Path:
    """policy.path, which holds a model that a run can begin with; raises ModelError."""
    try:
        directory = expanded(config.policy.path)
    except ValueError as error:
        raise ModelError(f"policy.{error}") from None
    check_model(directory)
    model_files.describe(directory)
    return directory


def draw(
    config: RunConfig,
    prompts: PromptSet,
    tokenizer: Tokenizer,
    model_dir: Path,
    *,
    first: int,
    count: int,
    openings: Sequence[str | None] = (),
) -> list[PromptRow]:
    """Prompts at running positions, tokenised; raises PromptError for one that does not fit."""
    context = context_length(config.rollout, model_dir)
    return draw_prompts(
        prompts,
        tokenizer,
        config.data,
        first=first,
        count=count,
        context_length=context,
        max_completion_length=config.sampling.max_completion_length,
        openings=openings,
    )


def check_held_out(
    config: RunConfig, model_dir: Path, tokenizer: Tokenizer, held: Collection[str] = frozenset()
) -> list[PromptRow]:
    """The prompts of `evaluation`, opened, checked against its rewards, and tokenised; [] without that section.

    held: the reward models that are not opened again. Raises PromptError and GradingError.
    """
    if config.evaluation is None:
        return []
    held_out = load_held_out(config.evaluation, config.rewards, held)
    return draw_held_out(config.evaluation, held_out, tokenizer, config.rollout, model_dir)


def _described(rows: list[PromptRow]) -> str:
    longest, chats = max(len(row.token_ids) for row in rows), sum(not isinstance(row.prompt, str) for row in rows)
    rendered = f", {chats} by the chat template" if chats else ""
    return f"all {len(rows)}, tokenised{rendered}, with up to {longest} tokens,"
