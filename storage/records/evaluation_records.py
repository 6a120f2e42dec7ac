"""The record of an evaluation that has ended (docs/format.md section 3)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from storage.records.records import STRICT, nonce


@dataclass(frozen=True, kw_only=True)
class EvaluatedPrompt:
    """How a weight version did on one prompt: mean reward and mean length of its responses, and three counts.

    graded: responses that did not fail; the other figures are theirs. correct: those whose reward reached the
    threshold. clipped: those cut off at the length limit. Lengths count the tokens that the policy sampled.
    """

    __pydantic_config__ = STRICT
    prompt_id: str
    graded: int
    correct: int
    clipped: int
    reward: float
    length: float


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """evaluations/<name>.json: the outcome of an evaluation; its existence says that the evaluation has ended.

    settings: all that decides the outcome; `digest` is computed from them. Metric names are those of
    docs/guide/evaluation.md.
    """

    KIND: ClassVar[str] = "evaluation"
    __pydantic_config__ = STRICT
    weight_version: int
    digest: str
    settings: dict[str, Any]
    metrics: dict[str, float]
    prompts: tuple[EvaluatedPrompt, ...]
    created_at_s: float
    nonce: str = field(default_factory=nonce)
