"""A fleet's rules, and whether a run belongs to it."""

from collections.abc import Sequence

from resources.secret_text import secret_in
from storage.clock import Clock
from storage.fleet import fleet_layout
from storage.fleet.fleet_reading import FleetReader, has_left, read_run
from storage.fleet.fleet_records import AdmittedRun, FleetRecord, LeftRecord
from storage.fleet.nesting import check_own_place
from storage.package_version import VERSION
from storage.records import records
from storage.records.run import exists, holds_run, next_iteration, plans_in_flight, read_plan
from storage.stores.connect import check_url, connect, is_below
from storage.stores.store import ConflictingRecord, ObjectMissing, ObjectStore
from tasks.configuration.iteration_config import resolved_in_force
from tasks.configuration.run_config import RunConfig
from tasks.sharing.phase_poller import other_version

# The host_ttl_s of a standing trainer's fleet (one run, one host). The TTL only delays the successor of a killed host.
STANDING_TTL_S = 20.0
# The phase_s and cycle_s of its run; with a single run no order of phases and no limit depends on either.
UNKNOWN_S = 1.0


def create_fleet(
    url: str,
    run_prefixes: Sequence[str],
    host_ttl_s: float,
    slowdown_max: float,
    clock: Clock,
    *,
    patience_s: float = 3600.0,
) -> None:
    """Create fleet.json; raises ConflictingRecord if the url holds a fleet with other rules, and ValueError."""
    store = connect(url)
    for prefix in run_prefixes:
        _check_prefix(prefix, url)
    if not exists(store, fleet_layout.FLEET):
        check_own_place("FLEET_URL", url, store)
    mine = FleetRecord(
        run_prefixes=tuple(run_prefixes),
        host_ttl_s=host_ttl_s,
        slowdown_max=slowdown_max,
        patience_s=patience_s,
        created_at_s=clock.wall(),
    )
    if not records.commit(store, fleet_layout.FLEET, mine):
        raise ConflictingRecord(f"{store.url} holds a fleet already; nothing was changed")


def _check_prefix(prefix: str, fleet_url: str) -> None:
    """Raise ValueError unless a run can lie below the place that the prefix names."""
    if not prefix:
        raise ValueError("--runs: value ''; allowed: a path or a url, below which runs may be admitted")
    what = secret_in(prefix)
    if what is not None:
        raise ValueError(f"--runs: {what} given; allowed: a url without it, because a fleet shows its rules to all")
    try:
        check_url(prefix)
    except ValueError as error:
        raise ValueError(f"--runs: {str(error).removeprefix('storage URL: ')}") from None
    if not is_below(prefix, prefix):
        raise ValueError(f"--runs: value {prefix!r}; allowed: no part '.' or '..', nor one that stands for it")
    if is_below(prefix, fleet_url):
        raise ValueError(f"--runs: value {prefix!r}; allowed: a place that is not in the fleet itself")


def open_fleet(url: str) -> tuple[ObjectStore, FleetRecord]:
    """The store and the rules of a fleet; raises LookupError if the url holds no fleet."""
    store = connect(url)
    try:
        return store, records.read(store, FleetRecord, fleet_layout.FLEET)
    except ObjectMissing:
        raise LookupError(f"{store.url} holds no fleet; make one by: gleaner fleet init {url} --runs PREFIX") from None


def leave(url: str, run_url: str, reason: str, clock: Clock) -> None:
    """Take a run out of a fleet for good; raises LookupError if the fleet has not admitted the run."""
    store, _ = open_fleet(url)
    run_id = fleet_layout.run_id(run_url)
    if not exists(store, fleet_layout.admitted(run_id)):
        raise LookupError(f"{store.url} has not admitted {run_url}")
    left = LeftRecord(id=run_id, reason=reason, left_at_s=clock.wall())
    records.commit(store, fleet_layout.left(run_id), left)


def check_admitted(config: RunConfig) -> None:
    """Check the run's place in the fleet of `trainer.fleet`; without a fleet there is nothing to check.

    For a run with a standing trainer, only membership in a second fleet is checked.

    Raises:
        LookupError: The fleet does not exist, has not admitted the run, or the run has left.
        ValueError: A second fleet has the run, the run was admitted with a different number of ranks, or the host of
            the run's seat has a different package version.
    """
    if config.trainer.placement == "standing":
        check_no_other_fleet(config, fleet_layout.standing(config.run.url))
    if config.trainer.fleet is None:
        return
    try:
        store, fleet = open_fleet(config.trainer.fleet)
    except LookupError as error:
        raise LookupError(f"trainer.fleet: {error}") from None
    run_id = fleet_layout.run_id(config.run.url)
    if not exists(store, fleet_layout.admitted(run_id)) or has_left(store, run_id):
        raise LookupError(
            f"trainer.fleet: value {config.trainer.fleet!r}, which has not admitted {config.run.url} or has let it "
            "go; admit it by: gleaner fleet admit CONFIG"
        )
    check_no_other_fleet(config, config.trainer.fleet)
    ranks = read_run(store, run_id).ranks
    if ranks != config.trainer.nproc_per_node:
        raise ValueError(
            f"trainer.nproc_per_node: value {config.trainer.nproc_per_node}; allowed: {ranks}, with which "
            f"{config.trainer.fleet} has admitted {config.run.url}"
        )
    reader = FleetReader(store, fleet)
    seat = reader.seat(run_id)
    host = None if seat is None else reader.host(seat.host)
    beat = None if host is None else reader.beat(host.incarnation)
    if host is not None and host.version != VERSION and (beat is None or beat.state != "gone"):
        raise ValueError(
            f"trainer.fleet: value {config.trainer.fleet!r}, whose host {host.machine} ({host.incarnation[:12]}) "
            f"{other_version(host.version, VERSION)}"
        )


def admit_alone(config: RunConfig, clock: Clock) -> None:
    """Create the fleet of a run with a standing trainer, and admit the run with its ranks, unless both are done.

    A run that has moved, or has changed its number of ranks between executions, gets new records; the hosts of the
    last execution have ended with the execution.
    """
    if config.trainer.placement != "standing":
        return
    run_url, ranks, now_s = config.run.url, config.trainer.nproc_per_node, clock.wall()
    store = connect(fleet_layout.standing(run_url))
    fleet = FleetRecord(run_prefixes=(run_url,), host_ttl_s=STANDING_TTL_S, created_at_s=now_s)
    run = AdmittedRun(
        id=fleet_layout.run_id(run_url),
        run_url=run_url,
        phase_s=UNKNOWN_S,
        cycle_s=UNKNOWN_S,
        state_bytes=0,
        admitted_at_s=now_s,
        ranks=ranks,
    )
    if not exists(store, fleet_layout.FLEET) or not records.read(store, FleetRecord, fleet_layout.FLEET).allows(
        run_url
    ):
        records.put(store, fleet_layout.FLEET, fleet)
    if not exists(store, run.key) or read_run(store, run.id).ranks != ranks:
        records.put(store, run.key, run)


def check_no_other_fleet(config: RunConfig, fleet: str) -> None:
    """Raise ValueError if the run's newest plan names a fleet other than `fleet`, and the run is still a member there.

    Hosts of both fleets would train every phase of the run: the learned weights agree, but every phase is paid twice.
    """
    store = connect(config.run.url)
    before = _fleet_before(store) if holds_run(store) else None
    if before is None:
        return
    other, run_id = connect(before), fleet_layout.run_id(config.run.url)
    if other.url == connect(fleet).url or has_left(other, run_id) or not exists(other, fleet_layout.admitted(run_id)):
        return
    given = f"fleet: value {fleet!r}" if config.trainer.fleet else f"placement: value {config.trainer.placement!r}"
    raise ValueError(
        f"trainer.{given}; allowed: {'' if config.trainer.fleet else 'shared with trainer.fleet '}{before!r}, to which "
        f"{config.run.url} belongs; take it out of there for good by: gleaner fleet leave {before} {config.run.url}"
    )


def _fleet_before(store: ObjectStore) -> str | None:
    """The fleet in the newest plan of a run; None without a plan or a fleet."""
    planned = plans_in_flight(store)
    try:
        plan = planned[-1] if planned else read_plan(store, next_iteration(store) - 1)
    except ObjectMissing:
        return None
    fleet = resolved_in_force(store, plan).get("trainer", {}).get("fleet")
    return fleet if isinstance(fleet, str) else None
