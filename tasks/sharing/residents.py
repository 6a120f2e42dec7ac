"""The states of runs that are kept near a trainer, and where: pure.

A resident state is a cache of a checkpoint: it equals the checkpoint whose digest it carries, so it may be dropped at
any time and nothing is ever written back. The tiers are the device, host memory, the local disk, and the object store,
which has every checkpoint anyway.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Tier = Literal["device", "host memory", "local disk", "object store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A run's state. digest: of the manifest of the checkpoint that it equals. needed_s: when it was needed last."""

    run: str
    tier: Tier
    num_bytes: int
    needed_s: float
    digest: str | None = None
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """A state is moved to a lower tier; to the object store means that it is dropped."""

    run: str
    tier: Tier


def is_usable(resident_digest: str | None, checkpoint_digest: str) -> bool:
    """Whether a phase that begins from this checkpoint may use the resident state instead of reading the checkpoint.

    Another host may have trained the last phase, with other last bits. Then the digests differ, and the state that the
    run goes on from is the one that is stored.
    """
    return resident_digest is not None and resident_digest == checkpoint_digest


def make_room(
    residents: Collection[Resident], num_bytes: int, *, memory_bytes: int, disk_bytes: int = 0
) -> tuple[Move, ...]:
    """The moves after which host memory has room for `num_bytes` more: the least recently needed states go first.

    They go to the local disk. What does not fit there, again the least recently needed, goes to the object store. Busy
    states stay; so there may be too little room even after all moves.
    """
    moved = _beyond([one for one in residents if one.tier == "host memory"], memory_bytes - num_bytes)
    on_disk = [one for one in residents if one.tier == "local disk"]
    dropped = {one.run for one in _beyond([*on_disk, *moved], disk_bytes)}
    leaving = [one for one in on_disk if one.run in dropped] + moved
    return tuple(Move(one.run, "object store" if one.run in dropped else "local disk") for one in leaving)


def _beyond(residents: Collection[Resident], capacity_bytes: int) -> list[Resident]:
    """Those that have to go so that the others fit, the least recently needed first."""
    excess = sum(one.num_bytes for one in residents) - capacity_bytes
    going: list[Resident] = []
    for one in sorted(residents, key=lambda one: (one.needed_s, one.run)):
        if excess > 0 and not one.busy and one.num_bytes > 0:
            going.append(one)
            excess -= one.num_bytes
    return going
