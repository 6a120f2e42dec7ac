"""Why ranks that were started together have ended, from what each of them said and how it ended: pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.errors import GleanerError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Why a rank gave up, in one line. lasting: whether every attempt would end alike.

    kinds: the names of the error's class and of the classes above it. errno: that of an OSError.
    """

    message: str
    lasting: bool = False
    kinds: tuple[str, ...] = ()
    errno: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a rank's process ended. code: its exit code, or minus the signal. killed: its launcher ended it.

    done: it said before that its work is done. failure: what it said before, at `told_at_s` of the machine's monotonic
    clock; None: it did not say that it fails.
    """

    rank: int
    code: int
    killed: bool = False
    done: bool = False
    failure: RankFailure | None = None
    told_at_s: float = 0.0


class RanksFailed(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """The ranks that this process has started could not train; the message is that of the one with which it began."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of(ends: Sequence[RankEnd]) -> RankFailure:
    """Why ranks failed that have all ended."""
    # A failure that lasts is the reason, whatever else ended: no rank says so of what it only suffers from another
    # (`misses_peer`), and hidden, it would be repeated for ever. NCCL's watchdog aborts a rank that waits for the one
    # that failed, without a word. Next comes a rank that ended so, as by SIGKILL: the others say then that they miss
    # it. Else the first that was said is the reason, because what is said later may be a consequence.
    told = [(end.told_at_s, end.failure) for end in ends if end.failure is not None]
    silent = [end for end in ends if end.failure is None and not end.killed and not end.done]
    reason = min(told, key=lambda each: (not each[1].lasting, each[0]))[1] if told else None
    if silent and (reason is None or not reason.lasting):
        which = "its process" if len(ends) == 1 else f"its rank {silent[0].rank}"
        return RankFailure(message=f"{which} ended with {silent[0].code}")
    return reason or RankFailure(message="it was ended")
