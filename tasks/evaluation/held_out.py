"""The held-out prompts of an evaluation: loaded, checked against its rewards, and tokenised."""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path

from storage.records.prompt_table import PromptRow
from tasks.configuration.evaluation import EvaluationConfig
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.turns import TurnsConfig
from tasks.grading.grader import check_rewards
from tasks.grading.reward import GradingError
from tasks.learning.pretrained import vocabulary_size
from tasks.prompts.draw import check_embedded, draw_prompts
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError, PromptSet
from tasks.prompts.tokenise import Tokenizer
from tasks.sampling.engines.choose import context_length

log = logging.getLogger(__name__)


def load_held_out(
    evaluation: EvaluationConfig,
    rewards: Sequence[RewardConfig],
    held: Collection[str] = frozenset(),
    *,
    turns: TurnsConfig | None = None,
) -> PromptSet:
    """The prompts of `evaluation.data`, each checked to be gradable by its rewards (or else by `rewards`, the run's).

    held: the reward models that are not opened again. turns: the run's. Logs doubts. Raises
    PromptError and GradingError; the messages begin with "evaluation".
    """
    try:
        prompts = load_prompts(evaluation.data, section="evaluation.data")
        for doubt in check_rewards(evaluation.rewards or rewards, prompts.columns, held, prompts, turns=turns):
            log.warning("not sure: evaluation: %s", doubt)
    except (PromptError, GradingError) as error:
        raise type(error)(_of_evaluation(error)) from error
    return prompts


def draw_held_out(
    evaluation: EvaluationConfig,
    prompts: PromptSet,
    tokenizer: Tokenizer,
    rollout: RolloutConfig,
    model_dir: Path,
    openings: Sequence[str | None] = (),
) -> list[PromptRow]:
    """The evaluated prompts, with their tokens; raises PromptError for one that does not fit, or has no embedding.

    openings: what environments add to each of them; () if nothing.
    """
    try:
        rows = draw_prompts(
            prompts,
            tokenizer,
            evaluation.data,
            first=0,
            count=len(prompts),
            context_length=context_length(rollout, model_dir),
            max_completion_length=evaluation.sampling.max_completion_length,
            openings=openings,
            section="evaluation.",
        )
        check_embedded(rows, vocabulary_size(model_dir))
    except PromptError as error:
        raise PromptError(_of_evaluation(error)) from error
    return rows


def _of_evaluation(error: Exception) -> str:
    """The error's text, which begins with "evaluation"."""
    return str(error) if str(error).startswith("evaluation.") else f"evaluation: {error}"
