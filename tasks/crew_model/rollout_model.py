"""A rollout by the event model: members of a plan begin, decode, take over work and stop, until all responses end.

Planning asks the model about each width under consideration. The forecast drives `CrewModel` directly, because
machines come and go in the middle of a forecast rollout.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from storage.records.records import TRAIN_POOL, SlotPlan
from tasks.crew_model.accounts import Account
from tasks.crew_model.crew import CrewModel
from tasks.crew_model.crew_member import EngineModel, ModelMember
from tasks.crew_model.events import Events
from tasks.crew_model.ownership import CrewRules
from tasks.crew_model.response_progress import Responses


@dataclass(frozen=True, kw_only=True)
class PlannedMember:
    """A member of the rollout.

    Attributes:
        engine: The abilities of the engine.
        start_s: The time of claiming the groups and beginning to decode.
        groups: The assigned groups, in order of beginning.
        batch_max: The most responses decoded together; None: the engine's limit.
        stop_s: The time of handing over unfinished responses and leaving; None: the member stays. The last living
            crew member stays in any case.
        in_crew: False for an engine on the trainer's machines.
    """

    engine: EngineModel
    start_s: float
    groups: tuple[int, ...] = ()
    batch_max: int | None = None
    stop_s: float | None = None
    in_crew: bool = True


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The times of a rollout.

    Attributes:
        ends_s: The end of the last response of each group, [groups].
        member_s: Seconds from the start of each member until the member left, or until the last response ended.
        moved: The number of responses taken over by a new holder, or taken unclaimed.
    """

    ends_s: npt.NDArray[np.float64]
    member_s: tuple[float, ...]
    moved: int

    @property
    def ended_s(self) -> float:
        return float(self.ends_s.max())


def modelled_rollout(
    lengths: npt.NDArray[np.int64],
    members: Sequence[PlannedMember],
    rules: CrewRules,
    *,
    prompt_tokens: int = 0,
    seed: int = 0,
) -> Rollout:
    """Play a rollout.

    Args:
        lengths: Tokens of each response, [groups, num_generations].
        members: The members of the rollout.
        rules: The settings of the run.
        prompt_tokens: Tokens of a prompt.
        seed: Decides the order in which members look for work.

    Raises Stalled if no member is left before the end.
    """
    return _Rollout(lengths, members, rules, prompt_tokens, seed).run()


class _Rollout:
    def __init__(
        self,
        lengths: npt.NDArray[np.int64],
        members: Sequence[PlannedMember],
        rules: CrewRules,
        prompt_tokens: int,
        seed: int,
    ) -> None:
        slots = [
            SlotPlan(slot=slot, pool=_pool(member), groups=member.groups, batch_max=member.batch_max)
            for slot, member in enumerate(members)
        ]
        self._members = members
        self._lives: list[ModelMember | None] = [None] * len(members)
        self._events = Events()
        self._ends_s = np.zeros(len(lengths))
        self._crew = CrewModel(
            self._events,
            Responses(lengths, slots),
            slots,
            rules,
            prompt_tokens,
            random.Random(seed),
            on_group=self._group_ended,
            on_end=lambda: None,
            on_leave=lambda member: self._crew.stop(member, notice=True),
            on_members=lambda: None,
        )

    def run(self) -> Rollout:
        for slot, member in enumerate(self._members):
            self._events.at(member.start_s, partial(self._begin, slot))
        self._events.run(lambda: self._crew.ended_s is not None)
        ended_s = float(self._ends_s.max())
        member_s = [0.0 if life is None else _lived_s(life, ended_s) for life in self._lives]
        return Rollout(ends_s=self._ends_s, member_s=tuple(member_s), moved=self._crew.moved)

    def _begin(self, slot: int) -> None:
        planned = self._members[slot]
        life = self._crew.begin(slot, planned.engine, Account(_pool(planned), 0.0, 0.0))
        self._lives[slot] = life
        self._crew.work(life)
        if planned.stop_s is not None and life.alive:
            self._events.at(planned.stop_s, partial(self._stop, life))

    def _stop(self, life: ModelMember) -> None:
        if life.alive and self._crew.alone_from_s is None:
            self._crew.stop(life, notice=True)

    def _group_ended(self, group: int) -> None:
        self._ends_s[group] = self._events.now_s


def _pool(member: PlannedMember) -> str:
    return "crew" if member.in_crew else TRAIN_POOL


def _lived_s(member: ModelMember, ended_s: float) -> float:
    left_s = ended_s if member.life.ended_s is None else member.life.ended_s
    return max(0.0, left_s - member.life.began_s)
