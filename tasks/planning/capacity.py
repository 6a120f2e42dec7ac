"""What the planner may use, and what it knows: pools of machines, lengths, and how the last iteration went."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.crew_model.step_time import NOMINAL, StepTime


@dataclass(frozen=True, kw_only=True)
class PoolCapacity:
    """A pool from which members of the crew may be taken.

    count_min, count_max: the least and the most members. usd_per_h: price of one member. responses_max: the most
    responses it decodes together. step_time: NOMINAL until one is measured. start_s: from the start of a process to the
    weights in place, in every iteration. cold_start_s: the same of one that has neither engine nor weights; 0: unknown.
    machine_start_s: until a process can start on a new machine. kept: whether its machines stay, and are paid for, from
    one iteration to the next; else each iteration starts new ones. there: the pool's machines that the last iteration
    leaves behind; None: unknown, so that none has to be started.
    losses_per_h: of one machine. available: machines at the end of the last iteration, if they were fewer than asked
    for, although more may come; None: as many as are asked for.
    """

    pool: str
    count_min: int
    count_max: int
    usd_per_h: float
    responses_max: int
    step_time: StepTime = NOMINAL
    start_s: float = 0.0
    cold_start_s: float = 0.0
    machine_start_s: float = 0.0
    kept: bool = True
    there: int | None = None
    losses_per_h: float = 0.0
    available: int | None = None

    @property
    def measured(self) -> bool:
        return self.step_time is not NOMINAL

    def expected(self, count: int) -> int:
        """How many of the members asked for are expected to come."""
        return count if self.available is None else min(count, self.available)


@dataclass(frozen=True, kw_only=True)
class TrainerCapacity:
    """The trainer's machines as members: `engines` engines, which generate until training begins.

    usd_per_h: of all of them together, paid whether they generate or wait. start_s: until the engines are ready.
    """

    engines: int
    usd_per_h: float
    responses_max: int
    step_time: StepTime = NOMINAL
    start_s: float = 0.0


@dataclass(frozen=True)
class GroupLengths:
    """The expected lengths of each group's responses: float64 arrays with one entry per group.

    expected: their mean; high: the length that one in ten exceeds, at least `expected`. predictor: its name; "none" if
    all groups are expected alike.
    """

    predictor: str
    expected: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.expected)


@dataclass(frozen=True, kw_only=True)
class StepWaits:
    """How the last concluded iteration went, in seconds.

    wait_train_s: the trainer's wait for responses, after its seeding; wait_remote_s: the crew's wait for the iteration
    to end, after its last response; train_s: the trainer's computing; rollout_s: the crew's decoding from its first
    token to its last (without a crew, that of the trainer's engines). members, members_at_end: of the crew, on average
    and when the last response had ended. generated_s: decoding of each of the trainer's engines, also beyond the
    planned window; None: not reported, so as planned. publish_s: of train_s, from the step to the published weights.
    behind_s: from the last response to the end of training.
    """

    wait_train_s: float
    wait_remote_s: float
    train_s: float
    rollout_s: float
    members: float
    members_at_end: int
    generated_s: float | None = None
    publish_s: float = 0.0
    behind_s: float = math.inf
