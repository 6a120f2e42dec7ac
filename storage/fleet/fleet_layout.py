"""Joins the keys below a fleet's root, which is a store of its own (docs/format.md section 11).

A run's own keys are those of storage/records/layout.py. Each function returns a key, or a prefix that ends with "/".
"""

import re

from storage.digests import digest_of
from storage.records import layout

FLEET = "fleet.json"
RUNS = "runs/"
HOSTS = "hosts/"
ALIVE = "alive/"
WAITING = "waiting/"
RUN_ID_DIGITS = 16
RUN_PATTERN = re.compile(rf"{RUNS}([0-9a-f]{{{RUN_ID_DIGITS}}})/(run\.json$|left\.json$|seats/)")
SEAT_PATTERN = re.compile(rf"{RUNS}([0-9a-f]{{{RUN_ID_DIGITS}}})/seats/(\d{{6,}})\.json")


def standing(run_url: str) -> str:
    """The url of the fleet in a run's directory whose only host is the trainer that stands for that run."""
    return f"{run_url.rstrip('/')}/{layout.STANDING.rstrip('/')}"


def run_id(run_url: str) -> str:
    """The name of a run in fleets: the first 16 hexadecimal digits of the digest of its url."""
    return digest_of(run_url.encode())[:RUN_ID_DIGITS]


def admitted(run: str) -> str:
    """The record that admits the run `run`, an id."""
    return f"{RUNS}{run}/run.json"


def left(run: str) -> str:
    """The record that the run has left."""
    return f"{RUNS}{run}/left.json"


def seats(run: str) -> str:
    """Prefix of the records of a run's seat."""
    return f"{RUNS}{run}/seats/"


def seat(run: str, epoch: int) -> str:
    """An epoch of a run's seat, from 1 on; created once, never overwritten."""
    return f"{seats(run)}{epoch:06d}.json"


def seat_address(key: str) -> tuple[str, int] | None:
    """Returns (run id, epoch) of a seat's key; None for any other key."""
    match = SEAT_PATTERN.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def run_of(key: str) -> str | None:
    """The id of the run whose record of admission, of leaving or of a seat has this key; None for any other key."""
    match = RUN_PATTERN.match(key)
    return match[1] if match else None


def host(incarnation: str) -> str:
    """The record of an incarnation of a host."""
    return f"{HOSTS}{incarnation}.json"


def alive(incarnation: str) -> str:
    """The heartbeat of a host."""
    return f"{ALIVE}{incarnation}.json"


def waiting(incarnation: str) -> str:
    """The heartbeat of a process that waits until its run is admitted."""
    return f"{WAITING}{incarnation}.json"


def spent_by(incarnation: str) -> str:
    """Prefix of the records of the time that a host spent."""
    return f"spent/{incarnation}/"


def spent(incarnation: str, sequence: int) -> str:
    """A record of the time that a host spent; numbers start at 0."""
    return f"{spent_by(incarnation)}{sequence:08d}.json"
