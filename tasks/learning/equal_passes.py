"""Tries a change that makes a model's passes faster, and undoes the change if log-probs move on any rank.

The trial compares log-probs of a probe. If the caller's function makes a backward pass, too, a kernel without a
backward pass fails here instead of in the first step.
"""

from collections.abc import Callable

from torch import Tensor

from tasks.learning.batching import TokenBatch
from tasks.learning.ranks import Ranks

# A pass over a batch: its log-probs, [B, T].
Pass = Callable[[TokenBatch], Tensor]
# How far log-probs may be from those before, on average: half-precision kernels differ by a tenth of that.
_DISTANCE_MAX = 0.2


def change_if_equal(
    apply: Callable[[], None],
    undo: Callable[[], None],
    logprobs: Pass,
    batch: TokenBatch,
    ranks: Ranks | None = None,
    further: Callable[[Tensor], str | None] = lambda _changed: None,
) -> str | None:
    """Change a model, and undo the change if log-probs move by more than a tolerance on any rank.

    Args:
        apply: Makes the change. Any exception of `apply`, or of `logprobs` after the change, counts as a reason to
            undo.
        undo: Takes the change back.
        logprobs: A pass of the model as it is.
        batch: The probe.
        ranks: The ranks that decide together; default: this process alone.
        further: Returns a further reason to undo, from the log-probs after the change, or None.

    Returns:
        The reason for undoing the change; None if the change stays.
    """
    before = logprobs(batch).detach()

    def difference() -> str | None:
        after = logprobs(batch).detach()
        distance = float((after - before).abs().mean())
        # Not a number is no distance that is allowed.
        reason = None if distance <= _DISTANCE_MAX else f"its log-probs are {distance:.3g} from those before"
        return reason or further(after)

    # A rank on which the change cannot be made would leave the others alone in the pass.
    reason = _of_any_rank(_outcome(apply), ranks) or _of_any_rank(_outcome(difference), ranks)
    if reason is not None:
        undo()
    return reason


def _outcome(trial: Callable[[], str | None]) -> str | None:
    """Return the result of a trial, or its exception as one line of text."""
    try:
        return trial()
    except Exception as error:  # noqa: BLE001 - a kernel or a model's code may refuse in any way
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _of_any_rank(reason: str | None, ranks: Ranks | None) -> str | None:
    reasons: list[str | None] = [reason] if ranks is None else ranks.gather(reason)
    return next(filter(None, reasons), None)
