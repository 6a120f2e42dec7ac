"""The values that tasks hand to each other: addresses and small numbers, never tokens.

They are plain dataclasses of plain fields, because Flyte carries them between machines as JSON.
"""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

from resources.visible_text import visible_line


@dataclass(frozen=True, kw_only=True)
class PlanReference:
    """An iteration whose plan is written.

    Attributes:
        run_url: the run.
        iteration: its number in the run.
        weight_version: the weights to generate with.
        execution: the name of the execution that advances the run.
        code: the digest of the code with which the execution was registered; empty: not compared.
    """

    run_url: str
    iteration: int
    weight_version: int
    execution: str
    code: str = ""


def with_code(references: Iterable[PlanReference], code: str) -> list[PlanReference]:
    """The references, for an execution that was registered with the code of this digest."""
    return [replace(each, code=code) for each in references]


@dataclass(frozen=True, kw_only=True)
class SlotOutcome:
    """The work of the last incarnation of a slot; the truth is in the journal."""

    slot: int
    incarnation: str
    tokens_generated: int
    tokens_recovered: int
    responses_finished: int


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """The iteration that was trained, the published weight version, and the mean reward; None without rewards.

    Without rewards `loss` says how the policy did.
    """

    plan: PlanReference
    weight_version: int
    reward: float | None
    loss: float | None = None

    @property
    def measured(self) -> str:
        """The reward, or else the loss, in words."""
        return _measured(self.reward, self.loss)


@dataclass(frozen=True, kw_only=True)
class EvaluationOutcome:
    """An evaluation of the run at `run_url` that has ended."""

    run_url: str
    evaluation: str
    weight_version: int
    metrics: dict[str, float]

    def __str__(self) -> str:
        scores = ", ".join(
            f"{name} {self.metrics[name]:.4g}" for name in sorted(self.metrics) if "/" not in name.removeprefix("val/")
        )
        return (
            f"Evaluation {self.evaluation} of weight version {self.weight_version} has ended: {scores or '-'}.\n"
            f"See all evaluations by: gleaner status {_argument(self.run_url)}"
        )


@dataclass(frozen=True, kw_only=True)
class IterationOutcome:
    """A committed iteration; everything else is in its report. As text, the outcome names the next command."""

    run_url: str
    iteration: int
    weight_version: int
    reward: float | None
    tokens: int
    tokens_recovered: int
    usd: float
    seconds: float = 0.0
    loss: float | None = None

    @property
    def measured(self) -> str:
        """Its numbers in words."""
        learned = _measured(self.reward, self.loss)
        return f"{learned}, {self.tokens:,} tokens, {self.seconds:.1f} s, {self.usd:.5f} $"

    def __str__(self) -> str:
        url = _argument(self.run_url)
        return (
            f"Iteration {self.iteration} is committed, with weight version {self.weight_version}: {self.measured}.\n"
            f"See all iterations by: gleaner status {url}\n"
            f"Read the responses by: gleaner view {url}\n"
            "To go on, give the same command again."
        )


def _measured(reward: float | None, loss: float | None) -> str:
    if reward is not None:
        return f"reward {reward:.3f}"
    return "no reward" if loss is None else f"loss {loss:.4f}"


def _argument(url: str) -> str:
    """A url as it is given to a command in a shell."""
    return shlex.quote(visible_line(url))
