"""Absent members: slots that never come, come after the end, or die for good, and outages of all members.

Absences are drawn before a history is simulated; `Pods` applies them while it runs.
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

FATES = ("never", "late", "dies", "dies")


@dataclass(frozen=True, kw_only=True)
class Outage:
    """All members are killed, and none starts for duration_s; if that is infinite, no crew member ever starts again."""

    at_s: float
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class Absence:
    """The planned members that are absent, for the trainer's machine to generate (planning.seeding "auto").

    Attributes:
        seeding_after_s: seconds without a living member until the trainer's machine generates.
        never: slots for which Flyte finds no machine.
        late_s: delay of late slots, counted from the end of the trainer.
        lives_s: slots whose lives are cut off after these times, without a new start after the last life.
        attempts_max: number of starts of a slot, whatever ends them.
    """

    seeding_after_s: float
    never: frozenset[int] = frozenset()
    late_s: Mapping[int, float] = field(default_factory=dict)
    lives_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    outages: tuple[Outage, ...] = ()
    attempts_max: float = math.inf

    @property
    def lasts_s(self) -> float:
        """The time by which every finite outage is over and every slot that dies for good is dead, without starts."""
        ends_s = [
            outage.at_s if math.isinf(outage.duration_s) else outage.at_s + outage.duration_s for outage in self.outages
        ]
        return max(ends_s, default=0.0) + max(map(sum, self.lives_s.values()), default=0.0)


def draw_absence(rng: random.Random, crew: Sequence[int], ttl_s: float, calm_at_s: float) -> Absence | None:
    """Draw the absences, which half of the histories have. crew: the slots that Flyte starts; all may be affected."""
    if rng.random() < 0.5:
        return None
    seeding_after_s = ttl_s * rng.choice((rng.uniform(0.5, 2), rng.uniform(1, 8)))
    share, never, late_s, lives_s = rng.choice((0.0, 0.3, 0.6, 1.0)), set(), {}, {}
    fates = rng.choice((FATES, FATES, ("never",), ("late",), ("dies",)))
    for slot in crew:
        fate = rng.choice(fates) if rng.random() < share else ""
        if fate == "never":
            never.add(slot)
        elif fate == "late":
            late_s[slot] = rng.uniform(0, 200)
        elif fate == "dies":
            lives_s[slot] = tuple(rng.uniform(1, 150) for _ in range(rng.randint(1, 3)))
    outages = _draw_outages(rng, rng.choice((0, 0, 1, 2, 4) if share else (1, 2, 4)), ttl_s, seeding_after_s, calm_at_s)
    return Absence(
        seeding_after_s=seeding_after_s,
        never=frozenset(never),
        late_s=late_s,
        lives_s=lives_s,
        outages=outages,
    )


def _draw_outages(
    rng: random.Random, number: int, ttl_s: float, seeding_after_s: float, calm_at_s: float
) -> tuple[Outage, ...]:
    """Draw outages one after the other. Many end when the trainer's machine has just begun to generate."""
    outages: list[Outage] = []
    at_s = rng.uniform(0, rng.choice((40.0, calm_at_s)))
    for _ in range(number):
        just_over_s = seeding_after_s + rng.uniform(0, 80)
        long_s = rng.choice((ttl_s * rng.uniform(2, 8), seeding_after_s * rng.uniform(1, 10), math.inf))
        outages.append(Outage(at_s=at_s, duration_s=rng.choice((just_over_s, just_over_s, long_s))))
        at_s += outages[-1].duration_s + rng.uniform(1, 60)
        if math.isinf(at_s):
            break
    return tuple(outages)


class Pods:
    """Flyte's view of the members: which are to be started when, and which slots of the crew have ended for good."""

    def __init__(self, absence: Absence | None, crew: Collection[int]) -> None:
        self._absence = absence or Absence(seeding_after_s=math.inf)
        self._crew = frozenset(crew)
        self._starts: Counter[int] = Counter()
        self._ended: set[int] = set()
        self._none_until_s = 0.0

    @property
    def all_ended(self) -> bool:
        """Whether the rollout map has ended."""
        return self._crew <= self._ended

    def comes(self, member: int) -> bool:
        """Whether the member starts at its arrival time."""
        return member not in self._absence.never and member not in self._absence.late_s

    def latecomers(self) -> dict[int, float]:
        """The slots that come after the iteration's end -> how long after."""
        return {} if math.isinf(self._none_until_s) else dict(self._absence.late_s)

    def delay_s(self, now_s: float) -> float:
        """How long no member starts from now on; infinite: none ever starts again."""
        return max(0.0, self._none_until_s - now_s)

    def none_until(self, when_s: float) -> None:
        """Begin an outage that lasts until `when_s`; an infinite one ends every slot."""
        self._none_until_s = max(self._none_until_s, when_s)
        if math.isinf(when_s):
            self._ended |= self._crew

    def start(self, member: int) -> float | None:
        """Begin one more life of a member; returns after how long it is cut off, or None."""
        self._starts[member] += 1
        lives_s = self._absence.lives_s.get(member)
        return None if lives_s is None else lives_s[self._starts[member] - 1]

    def starts_again(self, member: int) -> bool:
        """Whether a member that was lost has attempts left."""
        lives = len(self._absence.lives_s.get(member, ())) or math.inf
        return not math.isinf(self._none_until_s) and self._starts[member] < min(lives, self._absence.attempts_max)

    def ended(self, member: int) -> None:
        """Note that a member has left or was lost for good."""
        self._ended.add(member)
