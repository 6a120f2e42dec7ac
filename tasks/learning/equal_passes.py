"""Whether a model computes the same after a change that is to make its passes faster; all ranks decide alike.

What is compared are log-probs of a probe. Where the caller's function goes back through the model, too, a kernel that
refuses to do that is found here instead of in the first step.
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
    """Change a model unless it then computes something else on a rank.

    Args:
        apply: Makes the change; may raise anything, as may `logprobs` after it.
        undo: Takes the change back.
        logprobs: A pass of the model as it is.
        batch: The probe.
        ranks: Those that must decide alike; default: this process alone.
        further: Says what else is wrong, from the log-probs after the change.

    Returns:
        Why the change was taken back; None if it stays.
    """
    before = logprobs(batch).detach()

    def difference() -> str | None:
        after = logprobs(batch).detach()
        distance = float((after - before).abs().mean())
        # Not a number is no distance that is allowed.
        reason = None if distance <= _DISTANCE_MAX else f"its log-probs are {distance:.3g} from those before"
        return reason or further(after)

    # A rank on which the change cannot be made would leave the others alone in the pass.
    reason = _of_any_rank(_said(apply), ranks) or _of_any_rank(_said(difference), ranks)
    if reason is not None:
        undo()
    return reason


def _said(trial: Callable[[], str | None]) -> str | None:
    """What a trial says, or the error that it raises."""
    try:
        return trial()
    except Exception as error:  # noqa: BLE001 - a kernel or a model's code may refuse in any way
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _of_any_rank(reason: str | None, ranks: Ranks | None) -> str | None:
    reasons: list[str | None] = [reason] if ranks is None else ranks.gather(reason)
    return next(filter(None, reasons), None)
