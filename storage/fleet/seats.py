"""Seats: which incarnation of a host trains a run (docs/format.md section 11).

The seat of a run is a log of epochs, serialised by create-if-absent; the newest epoch says who has it. A seat saves
work. Safety does not depend on it, because what a phase writes is created once.
"""

from storage.fleet import fleet_layout
from storage.fleet.fleet_records import SeatRecord, read_record
from storage.records import records
from storage.stores.store import ObjectStore


def read_seat(store: ObjectStore, run: str, epoch: int) -> SeatRecord:
    """One epoch of a run's seat; raises ObjectMissing, and CorruptObject if it is of another run or epoch."""
    return read_record(store, SeatRecord, fleet_layout.seat(run, epoch))


def newest_seat(store: ObjectStore, run: str) -> SeatRecord | None:
    """The newest epoch of a run's seat, with one LIST and one GET; None if no host has had the seat."""
    addresses = (fleet_layout.seat_address(key) for key in store.list(fleet_layout.seats(run)))
    epochs = [address[1] for address in addresses if address is not None]
    return read_seat(store, run, max(epochs)) if epochs else None


def take_seat(store: ObjectStore, run: str, after: int, host: str) -> bool:
    """Take the epoch that follows on `after` (0: the first) for this incarnation of a host; False if another did.

    A lost answer to its own write is resolved by reading back. Raises StoreUnavailable if the outcome is unknown: the
    next look at the seat shows its holder.
    """
    seat = SeatRecord(run=run, epoch=after + 1, host=host)
    return records.commit(store, fleet_layout.seat(run, seat.epoch), seat)
