"""Inputs of the planner: the capacity of each pool, expected lengths, and the waits of the last iteration."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.crew_model.step_time import NOMINAL, StepTime


@dataclass(frozen=True, kw_only=True)
class PoolCapacity:
    """A pool from which members of the crew may be taken.

    Attributes:
        name: name of the pool in the configuration.
        count_min: fewest members.
        count_max: most members.
        usd_per_h: price of one member.
        responses_max: most responses that a member decodes together.
        step_time: measured step time; NOMINAL before the first measurement.
        start_s: seconds from the start of a process until the weights are loaded, in every iteration.
        cold_start_s: like start_s, for a process without engine and weights; 0 if never measured.
        machine_start_s: seconds until a process can start on a new machine.
        kept: True if machines stay, and are paid for, from one iteration to the next; False if each iteration starts
            new machines.
        machines_present: machines that the last iteration leaves running; None (unknown) counts as enough, so no
            machine start is expected.
        losses_per_h: losses of one machine per hour.
        available: machines at the end of the last iteration if fewer came than the plan wanted; more may still come.
            None: as many as a plan wants.
    """

    name: str
    count_min: int
    count_max: int
    usd_per_h: float
    responses_max: int
    step_time: StepTime = NOMINAL
    start_s: float = 0.0
    cold_start_s: float = 0.0
    machine_start_s: float = 0.0
    kept: bool = True
    machines_present: int | None = None
    losses_per_h: float = 0.0
    available: int | None = None

    @property
    def measured(self) -> bool:
        return self.step_time is not NOMINAL

    def expected(self, count: int) -> int:
        """The number of members expected to come if a plan wants `count`."""
        return count if self.available is None else min(count, self.available)


@dataclass(frozen=True, kw_only=True)
class TrainerCapacity:
    """The trainer's machines as members, whose engines generate until training begins.

    Attributes:
        engines: number of rollout engines on the trainer's machines.
        usd_per_h: price of all the trainer's machines together, paid while generating and while waiting.
        responses_max: most responses that an engine decodes together.
        step_time: measured step time of an engine; NOMINAL before the first measurement.
        start_s: seconds until the engines are ready.
    """

    engines: int
    usd_per_h: float
    responses_max: int
    step_time: StepTime = NOMINAL
    start_s: float = 0.0


@dataclass(frozen=True)
class GroupLengths:
    """The expected lengths of each group's responses.

    Attributes:
        predictor: name of the predictor; "none" if every group has equal expectations.
        expected: mean length in tokens, float64 [groups].
        high: 0.9 quantile of the length in tokens, at least `expected`, float64 [groups].
    """

    predictor: str
    expected: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.expected)


@dataclass(frozen=True, kw_only=True)
class StepWaits:
    """Seconds and members of the last concluded iteration.

    Attributes:
        wait_train_s: the trainer's wait for responses, after seeding.
        wait_remote_s: the crew's wait for the end of the iteration, after the last response.
        train_s: the trainer's computing time.
        rollout_s: the crew's decoding from the first token to the last; without a crew, the decoding of the trainer's
            engines.
        members: mean number of crew members.
        members_at_end: crew members at the end of the last response.
        generated_s: decoding time of each engine of the trainer, also beyond the planned window; None (not reported):
            as planned.
        publish_s: part of train_s from the optimizer step to the published weights.
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
