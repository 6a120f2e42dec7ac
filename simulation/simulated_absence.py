"""What Flyte does not start: slots that never come, come when all is over, or die for good, and outages of all members.

Drawn before a history happens, and kept account of while it does. Knows no session and no store.
"""

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

FATES = ("never", "late", "dies", "dies")


@dataclass(frozen=True, kw_only=True)
class Outage:
    """All members are killed, and none starts for duration_s; where that is infinite, none of the crew ever again."""

    at_s: float
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class Absence:
    """Who is not there when the plan counts on it; then the trainer's machine generates ("planning.seeding": "auto").

    seeding_after_s: when no member has lived for so long. never: slots that Flyte finds no machine for.
    late_s: slots that start so long after the trainer has ended. lives_s: slots whose every life is cut off after so
    long, and that are not started again after the last.
    """

    seeding_after_s: float
    never: frozenset[int] = frozenset()
    late_s: Mapping[int, float] = field(default_factory=dict)
    lives_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    outages: tuple[Outage, ...] = ()

    @property
    def lasts_s(self) -> float:
        """By when every outage that ends has ended, and all have died that do, starts not counted."""
        ends_s = [
            outage.at_s if math.isinf(outage.duration_s) else outage.at_s + outage.duration_s for outage in self.outages
        ]
        return max(ends_s, default=0.0) + max(map(sum, self.lives_s.values()), default=0.0)


def draw_absence(rng: random.Random, crew: Sequence[int], ttl_s: float, calm_at_s: float) -> Absence | None:
    """In one of two histories. crew: the slots that Flyte starts; in some, every one of them has something drawn."""
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
    """One after the other. Many end when the trainer's machine has just begun to generate."""
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
    """Flyte's account of the members: who is to be started when, and which slots of the crew have ended for good."""

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
        """Whether it starts at the time of its arrival."""
        return member not in self._absence.never and member not in self._absence.late_s

    def latecomers(self) -> dict[int, float]:
        """The slots that come after the iteration's end, and how long after."""
        return {} if math.isinf(self._none_until_s) else dict(self._absence.late_s)

    def delay_s(self, now_s: float) -> float:
        """How long nobody starts yet; infinite: nobody ever does again."""
        return max(0.0, self._none_until_s - now_s)

    def none_until(self, when_s: float) -> None:
        """An outage begins that lasts so long; an infinite one is the end of every slot."""
        self._none_until_s = max(self._none_until_s, when_s)
        if math.isinf(when_s):
            self._ended |= self._crew

    def start(self, member: int) -> float | None:
        """One more life of it begins; returns after how long it is cut off, None where it is not."""
        self._starts[member] += 1
        lives_s = self._absence.lives_s.get(member)
        return None if lives_s is None else lives_s[self._starts[member] - 1]

    def starts_again(self, member: int) -> bool:
        """Whether a member that was lost has attempts left."""
        lives_s = self._absence.lives_s.get(member)
        return not math.isinf(self._none_until_s) and (lives_s is None or self._starts[member] < len(lives_s))

    def ended(self, member: int) -> None:
        """It has left, or was lost for good."""
        self._ended.add(member)
