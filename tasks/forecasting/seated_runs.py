"""The runs of a fleet beside which a run would train, for a forecast: read once, without taking part."""

from storage import fleet_layout
from storage.clock import Clock
from storage.seats import newest_seat
from tasks.configuration.run_config import RunConfig
from tasks.forecasting.phases import Sharers
from tasks.sharing.fleet_rooms import look_at_rooms
from tasks.sharing.membership import open_fleet
from tasks.sharing.seat_placement import Room


def sharers_of(config: RunConfig, clock: Clock) -> Sharers | None:
    """The runs that share the trainer's machines: as many as declared, else as the run's fleet seats them.

    None if machines are the run's own, or it is not said who shares them. A run without a seat is expected where the
    other runs need the least of a host's time, of the hosts with a device for each of its ranks, and no other. It takes
    as long as `look_at_rooms`. Raises LookupError if there is no fleet, and the store's errors.
    """
    declared = config.forecast.runs_per_trainer
    if declared is not None:
        return Sharers(alike=declared - 1)
    if config.trainer.fleet is None:
        return None
    store, fleet = open_fleet(config.trainer.fleet)
    run_id = fleet_layout.run_id(config.run.url)
    seen = look_at_rooms(store, fleet, clock, without=run_id)
    seat = newest_seat(store, run_id)
    ranks = config.trainer.nproc_per_node
    rooms = {room.host: room for room in seen.rooms if room.devices == ranks}
    if not rooms:
        seated = tuple(run for run in seen.runs.values() if run.ranks == ranks)
    elif seat is not None and seat.host in rooms:
        seated = rooms[seat.host].seated
    else:
        seated = min(rooms.values(), key=_load).seated
    return Sharers(others=seated, slowdown_max=fleet.slowdown_max, switch_s=seen.switch_s)


def _load(room: Room) -> float:
    return sum(run.load for run in room.seated)
