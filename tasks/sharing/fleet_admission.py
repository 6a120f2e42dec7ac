"""The rules of a fleet, and which runs are admitted to it."""

from collections.abc import Sequence
from pathlib import Path

from storage import fleet_layout, records
from storage.clock import Clock
from storage.connect import connect
from storage.fleet_records import AdmittedRun, FleetRecord, LeftRecord
from storage.run import exists, holds_run, reports
from storage.store import ConflictingRecord, ObjectMissing, ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.learning.pretrained import count_parameters

FLOAT32_BYTES = 4
# Parameters and two moments.
TRAINED_TENSORS = 3


def create_fleet(url: str, run_prefixes: Sequence[str], host_ttl_s: float, slowdown_max: float, clock: Clock) -> None:
    """Create fleet.json; raises ConflictingRecord if the url holds a fleet with other rules, and ValueError."""
    store = connect(url)
    mine = FleetRecord(
        run_prefixes=tuple(run_prefixes),
        host_ttl_s=host_ttl_s,
        slowdown_max=slowdown_max,
        created_at_s=clock.wall(),
    )
    if not records.commit(store, fleet_layout.FLEET, mine):
        raise ConflictingRecord(f"{store.url} holds a fleet already; nothing was changed")


def open_fleet(url: str) -> tuple[ObjectStore, FleetRecord]:
    """The store of a fleet that exists, and its rules; raises LookupError if there is none."""
    store = connect(url)
    try:
        return store, records.read(store, FleetRecord, fleet_layout.FLEET)
    except ObjectMissing:
        raise LookupError(f"{store.url} holds no fleet; make one by: gleaner fleet init {url} --runs PREFIX") from None


def admit(
    config: RunConfig, model: Path, share: float, phase_s: float | None, cycle_s: float | None, clock: Clock
) -> AdmittedRun:
    """Admit a run to the fleet that its configuration names, and return its record.

    What is not given is the median of the run's reports. Raises ValueError for a run that the fleet does not allow or
    of which nothing is known, LookupError if there is no fleet, and ConflictingRecord if the run has left.
    """
    if config.trainer.fleet is None:
        placement = config.trainer.placement
        raise ValueError(f"trainer.placement: value {placement!r}; allowed in a fleet: 'shared', with trainer.fleet")
    store, fleet = open_fleet(config.trainer.fleet)
    if not fleet.allows(config.run.url):
        raise ValueError(f"run.url: value {config.run.url!r}; allowed in this fleet: below {_or(fleet.run_prefixes)}")
    run_id = fleet_layout.run_id(config.run.url)
    if exists(store, fleet_layout.left(run_id)):
        raise ConflictingRecord(f"{config.run.url} has left the fleet {store.url} for good; give the run another url")
    phase_s, cycle_s = _profile(config, phase_s, cycle_s)
    mine = AdmittedRun(
        id=run_id,
        run_url=config.run.url,
        phase_s=phase_s,
        cycle_s=cycle_s,
        state_bytes=expected_state_bytes(config, model),
        share=share,
        admitted_at_s=clock.wall(),
    )
    if records.commit(store, fleet_layout.admitted(run_id), mine):
        return mine
    return records.read(store, AdmittedRun, fleet_layout.admitted(run_id))


def leave(url: str, run_url: str, reason: str, clock: Clock) -> None:
    """Take a run out of a fleet for good; raises LookupError if it is not in there."""
    store, _ = open_fleet(url)
    run_id = fleet_layout.run_id(run_url)
    if not exists(store, fleet_layout.admitted(run_id)):
        raise LookupError(f"{store.url} has not admitted {run_url}")
    left = LeftRecord(id=run_id, reason=reason, left_at_s=clock.wall())
    records.commit(store, fleet_layout.left(run_id), left)


def check_admitted(config: RunConfig) -> None:
    """Raise LookupError unless the fleet that the configuration names, if it names one, has admitted the run."""
    if config.trainer.fleet is None:
        return
    store, _ = open_fleet(config.trainer.fleet)
    run_id = fleet_layout.run_id(config.run.url)
    if not exists(store, fleet_layout.admitted(run_id)) or exists(store, fleet_layout.left(run_id)):
        raise LookupError(
            f"trainer.fleet: value {config.trainer.fleet!r}, which has not admitted {config.run.url} or has let it "
            "go; admit it by: gleaner fleet admit CONFIG"
        )


def expected_state_bytes(config: RunConfig, model: Path) -> int:
    """The bytes of a run's resident state: float32 parameters and moments, the reference, and the critic.

    Raises ModelError if the model's folder cannot be read.
    """
    parameters = count_parameters(model)
    tensors = TRAINED_TENSORS
    if config.lora is not None:
        # The moments are those of the adapters, which are small beside the model.
        tensors = 1
    elif config.algorithm.kl_coef > 0:
        tensors += 1
    if config.algorithm.estimator.needs_critic:
        tensors += TRAINED_TENSORS
    return tensors * parameters * FLOAT32_BYTES


def _profile(config: RunConfig, phase_s: float | None, cycle_s: float | None) -> tuple[float, float]:
    """The expected seconds of a phase and of a cycle."""
    store = connect(config.run.url)
    found = reports(store) if holds_run(store) else []
    if found:
        middle = sorted(found, key=lambda report: report.metrics["timing_s/iteration"])[len(found) // 2].metrics
        phase_s = middle["timing_s/compute"] if phase_s is None else phase_s
        cycle_s = middle["timing_s/iteration"] if cycle_s is None else cycle_s
    if phase_s is None or cycle_s is None:
        missing = "--phase-s" if phase_s is None else "--cycle-s"
        raise ValueError(f"{missing}: value missing; allowed: seconds above 0, because the run has no iteration yet")
    return phase_s, cycle_s


def _or(prefixes: Sequence[str]) -> str:
    return " or ".join(prefixes)
