"""The reason for the end of ranks that started together, from each rank's report and exit code. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.errors import GleanerError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The report of a rank that gives up.

    Attributes:
        message: The reason, in one line.
        lasting: True if every attempt would fail alike.
        kinds: The names of the error's class and its base classes.
        errno: The number of an OSError; None for other errors.
    """

    message: str
    lasting: bool = False
    kinds: tuple[str, ...] = ()
    errno: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """The end of a rank's process.

    Attributes:
        rank: The number of the rank.
        code: The exit code, or minus the signal.
        killed: True if the launcher killed the process.
        done: True if the rank had reported that its work is done.
        failure: The rank's report of a failure; None without a report.
        reported_at_s: Time of the report, on the machine's monotonic clock.
    """

    rank: int
    code: int
    killed: bool = False
    done: bool = False
    failure: RankFailure | None = None
    reported_at_s: float = 0.0


class RanksFailed(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """The ranks of this launcher could not train; the message is the report of the first cause."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failure_of(ends: Sequence[RankEnd]) -> RankFailure:
    """The first cause among the ends of all ranks."""
    # A failure that lasts is the reason, whatever else ended: no rank says so of what it only suffers from another
    # (`misses_peer`), and hidden, it would be repeated for ever. NCCL's watchdog aborts a rank that waits for the one
    # that failed, without a word. Next comes a rank that ended so, as by SIGKILL: the others say then that they miss
    # it. Else the first that was said is the reason, because what is said later may be a consequence.
    told = [(end.reported_at_s, end.failure) for end in ends if end.failure is not None]
    silent = [end for end in ends if end.failure is None and not end.killed and not end.done]
    reason = min(told, key=lambda each: (not each[1].lasting, each[0]))[1] if told else None
    if silent and (reason is None or not reason.lasting):
        which = "its process" if len(ends) == 1 else f"its rank {silent[0].rank}"
        return RankFailure(message=f"{which} ended with {silent[0].code}")
    return reason or RankFailure(message="it was ended")
