"""Runs and fleets in each other: whether a place lies in a run or fleet, or holds one below it.

Each has a directory of its own. An object in a foreign directory would be listed, kept and deleted as part of it.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from storage.fleet import fleet_layout
from storage.records import layout
from storage.records.run import exists
from storage.stores.connect import LOCAL, connect, place
from storage.stores.store import ObjectStore, StorageError

# What lies in a place: its kind, and the object by which it is known.
Mark = tuple[str, str]
RUN, FLEET = ("run", layout.RUN), ("fleet", fleet_layout.FLEET)


def check_own_place(field: str, url: str, store: ObjectStore, others: Collection[Mark] = (RUN, FLEET)) -> None:
    """Raise ValueError if a new run or fleet at `url` would lie in, or above, a place of `others`.

    field: name of the url's field, for the message. Unreadable places above are passed over.
    """
    marks = {name: kind for kind, name in others}
    for above in _places_above(url):
        for name, kind in marks.items():
            if _holds(above, name):
                raise ValueError(f"{field}: value {url!r}; allowed: a place of its own, not in the {kind} at {above}")
    for key in store.list(""):
        folder, _, name = key.rpartition("/")
        if name in marks:
            where = f"above the {marks[name]} in {folder}" if folder else f"that of a {marks[name]}"
            raise ValueError(f"{field}: value {url!r}; allowed: a place of its own, not {where}")


def _places_above(url: str) -> Iterator[str]:
    """The urls of all places above, the nearest first."""
    scheme, *parts = place(url)
    if scheme == LOCAL:
        yield from map(str, Path(*parts).parents)
    else:
        yield from (f"{scheme}://{'/'.join(parts[:count])}" for count in range(len(parts) - 1, 0, -1))


def _holds(url: str, name: str) -> bool:
    try:
        return exists(connect(url), name)
    except (StorageError, OSError, ValueError):
        return False
