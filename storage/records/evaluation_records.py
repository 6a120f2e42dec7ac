"""The record of an evaluation that has ended (docs/format.md section 3)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from storage.records.records import STRICT, nonce


@dataclass(frozen=True, kw_only=True)
class EvaluatedPrompt:
    """The result of a weight version on one prompt, over the responses that did not fail.

    Attributes:
        graded: number of responses that did not fail.
        correct: number of responses whose reward reached the threshold.
        clipped: number of responses cut off at the length limit.
        reward: mean reward.
        length: mean number of tokens that the policy sampled.
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

    Attributes:
        settings: all fields that decide the outcome.
        digest: digest of `settings`.
        metrics: by the names of docs/guide/evaluation.md.
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
