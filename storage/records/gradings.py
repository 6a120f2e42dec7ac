"""Gradings: further rewards for a run's stored responses, each under a name (docs/format.md section 12)."""

import logging
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from storage.records import layout, records
from storage.records.records import STRICT
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)
# A part of keys, and no name of a folder above.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)
_RECORD = re.compile(rf"{layout.GRADINGS}({_NAME.pattern})/grading\.json", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class GradingRecord:
    """gradings/<name>/grading.json: the rewards of a grading; the bytes depend on the content alone.

    Attributes:
        rewards: of each function in order `name`, all settings that decide its values, the digest of a reward model's
            files as `model`, and the digest of the file with the code of a user's function as `source`.
    """

    KIND: ClassVar[str] = "grading"
    __pydantic_config__ = STRICT
    rewards: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class GradedRecord:
    """gradings/<name>/<n>.json: what a grading gives to the responses of iteration n that did not fail.

    Attributes:
        responses: numbers, ascending.
        reward: weighted sum for each of the responses.
        rewards: value for each of the responses, by function; None: not applicable.
        reward_errors, given_up: as in a batch record.
    """

    KIND: ClassVar[str] = "graded"
    __pydantic_config__ = STRICT
    iteration: int
    responses: tuple[int, ...]
    reward: tuple[float, ...]
    rewards: dict[str, tuple[float | None, ...]]
    reward_errors: tuple[str, ...]
    given_up: tuple[str, ...]

    def __post_init__(self) -> None:
        if any(before >= after for before, after in pairwise(self.responses)):
            raise ValueError("responses: allowed: numbers in ascending order")
        for name, values in {"reward": self.reward, **self.rewards}.items():
            if len(values) != len(self.responses):
                raise ValueError(f"{name}: {len(values)} values; allowed: {len(self.responses)}, one for each response")

    def reward_of(self, response: int) -> float | None:
        """The weighted sum for a response by number; None if the response is not graded."""
        at = bisect_left(self.responses, response)
        return self.reward[at] if self.responses[at : at + 1] == (response,) else None


def check_name(name: str) -> None:
    """Raise ValueError for a name that no grading can have."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name: value {name!r}; allowed: up to 100 letters, digits, '.', '_' and '-', the first no '.' and no '-'"
        )


def gradings(store: ObjectStore) -> list[str]:
    """The names of a run's gradings, in order."""
    return [match[1] for key in store.list(layout.GRADINGS) if (match := _RECORD.fullmatch(key))]


def read_graded(store: ObjectStore, name: str, iteration: int) -> GradedRecord:
    """What the grading `name` gives to an iteration; raises LookupError for what is not graded, and CorruptObject."""
    check_graded(store, name, [iteration])
    return records.read(store, GradedRecord, layout.graded(name, iteration))


def check_graded(store: ObjectStore, name: str, iterations: Iterable[int]) -> None:
    """Raise LookupError, in one line, unless the grading `name` is there and has all these iterations."""
    names = gradings(store)
    if name not in names:
        allowed = ", ".join(names) or "none, as `gleaner regrade` has graded nothing yet"
        raise LookupError(f"grading: value {name!r}; allowed: {allowed}")
    held = set(store.list(f"{layout.GRADINGS}{name}/"))
    missing = next((each for each in iterations if layout.graded(name, each) not in held), None)
    if missing is not None:
        raise LookupError(f"grading {name!r} has no iteration {missing}; `gleaner regrade` adds it")


def gradings_of(store: ObjectStore, iteration: int) -> dict[str, GradedRecord]:
    """What each grading gives to an iteration, by name; an unreadable one is left out with a warning."""
    found = {}
    for name in gradings(store):
        try:
            found[name] = records.read(store, GradedRecord, layout.graded(name, iteration))
        except ObjectMissing:
            continue
        except CorruptObject as error:
            log.warning("left out: %s", error)
    return found


def check_rewards_of(store: ObjectStore, name: str, mine: GradingRecord) -> None:
    """Raise ConflictingRecord, naming the first difference, if a grading of this name has other rewards than `mine`."""
    try:
        held = records.read(store, GradingRecord, layout.grading(name))
    except ObjectMissing:
        return
    difference = _difference(held.rewards, mine.rewards)
    if difference is not None:
        raise ConflictingRecord(
            f"name: value {name!r}, whose rewards are others ({difference}); allowed: those, or another name"
        )


def _difference(held: Sequence[dict[str, Any]], mine: Sequence[dict[str, Any]]) -> str | None:
    names, own = ([str(reward.get("name")) for reward in rewards] for rewards in (held, mine))
    if names != own:
        return f"{', '.join(names)} there and {', '.join(own)} here"
    for there, here in zip(held, mine, strict=True):
        for setting in sorted({*there, *here}):
            if there.get(setting) != here.get(setting):
                return f"{here['name']}.{setting} is {there.get(setting)!r} there and {here.get(setting)!r} here"
    return None
