"""What the planner may use, and what it knows of it: pools of machines, lengths, and how the iteration before went."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.planning.step_time import NOMINAL, StepTime


@dataclass(frozen=True, kw_only=True)
class CrewOffer:
    """A pool from which members of the crew may be taken.

    count_min, count_max: members at least, and at most (of what there is). usd_per_h: of one member. responses_max: it
    decodes together. step_time: NOMINAL while nothing was measured. start_s: from being asked for to the weights in
    place, as far as it is known. losses_per_h: of one machine. available: machines that there were at last, where they
    were fewer than were asked for; more may come. None: as many as are asked for.
    """

    pool: str
    count_min: int
    count_max: int
    usd_per_h: float
    responses_max: int
    step_time: StepTime = NOMINAL
    start_s: float = 0.0
    losses_per_h: float = 0.0
    available: int | None = None

    @property
    def measured(self) -> bool:
        return self.step_time is not NOMINAL

    def expected(self, count: int) -> int:
        """How many will be there, of so many members that are asked for."""
        return count if self.available is None else min(count, self.available)


@dataclass(frozen=True, kw_only=True)
class ReservedOffer:
    """The trainer's machines as members: so many engines, which generate until training begins.

    usd_per_h: of all of them together; paid whether they generate or wait. start_s: until the engines are ready.
    """

    engines: int
    usd_per_h: float
    responses_max: int
    step_time: StepTime = NOMINAL
    start_s: float = 0.0


@dataclass(frozen=True)
class GroupLengths:
    """What is expected of the lengths of each group's responses: float64 arrays of one entry per group.

    expected: their mean; high: what one in ten exceeds, at least `expected`. predictor: who says so; "none" when all
    groups are expected alike.
    """

    predictor: str
    expected: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.expected)


@dataclass(frozen=True, kw_only=True)
class StepWaits:
    """How the last concluded iteration went, in seconds.

    wait_train_s: the trainer waited for responses (after it had ended its seeding); wait_remote_s: the crew waited for
    the iteration to end after its last response; train_s: the trainer computed; rollout_s: the crew decoded, from the
    first token to the last (where there was no crew, the trainer's engines). members, members_at_end: of the crew, on
    average and when the last response had ended. generated_s: each of the trainer's engines decoded for so long, beyond
    the planned window too; None: not told, so as the plan had it.
    """

    wait_train_s: float
    wait_remote_s: float
    train_s: float
    rollout_s: float
    members: float
    members_at_end: int
    generated_s: float | None = None
