"""Admits runs to a fleet if no run would become too slow."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from storage.clock import Clock
from storage.errors import GleanerError
from storage.fleet import fleet_layout
from storage.fleet.fleet_reading import has_left, read_run, waiting_runs
from storage.fleet.fleet_records import GIB, AdmittedRun, FleetRecord, Prediction
from storage.paths import expanded
from storage.records import records
from storage.records.run import exists, holds_run, reports
from storage.stores.connect import connect
from storage.stores.store import ConflictingRecord, ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.crew_model.events import Stalled
from tasks.forecasting.expected_profile import expected_profile
from tasks.hub.policy_size import HubModel, hub_parameters, policy_of
from tasks.hub.repositories import names_repository
from tasks.learning.pretrained import count_parameters
from tasks.sharing.admission_forecast import Choice, choices
from tasks.sharing.admission_queue import Waiting, may_not_pass
from tasks.sharing.fleet_ledger import measured_cycle_s
from tasks.sharing.fleet_rooms import look_at_rooms
from tasks.sharing.membership import check_no_other_fleet, open_fleet
from tasks.sharing.residents import resident_state_bytes
from tasks.sharing.seat_placement import HostRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A run as described by its operator.

    Attributes:
        share: The weight of the run's waiting.
        phase_s: As in AdmittedRun. None: the median of the run's reports, or without reports the forecast.
        cycle_s: As in AdmittedRun. None: the median of the run's reports, or without reports the forecast.
        switch_s: Seconds of a switch. None: as measured by the fleet's hosts, or by the size of states.
    """

    share: float = 1.0
    phase_s: float | None = None
    cycle_s: float | None = None
    switch_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A run that a fleet admits.

    Attributes:
        run: The run's record.
        choices: The possible hosts, the least worst slowdown first; empty only for a run admitted earlier.
        names: The names of runs, by id.
        machines: The names of hosts, by incarnation.
    """

    run: AdmittedRun
    choices: Sequence[Choice]
    names: Mapping[str, str]
    machines: Mapping[str, str]


class MustWaitError(GleanerError, ValueError):
    """The fleet does not admit the run now, but may after a run leaves or a host comes."""


def admit(
    config: RunConfig,
    model: Path,
    profile: Profile,
    clock: Clock,
    *,
    dry_run: bool = False,
) -> Admission:
    """Admit a run to the fleet that its configuration names, unless some run would become too slow on every host.

    An admitted run keeps its record; only the prediction is made again. With `dry_run` nothing is written.
    Two simultaneous admissions do not see each other.

    Raises:
        ValueError: The fleet does not allow the run, a second fleet has the run, no expected times are known, or no
            host can train the ranks or the state of the run.
        MustWaitError: A run would exceed the fleet's `slowdown_max`, no host has memory left, or a run in front waits.
        LookupError: There is no fleet.
        ConflictingRecord: The run has left the fleet.
    """
    newcomer = partial(_new_run, config, model, profile, clock)
    return _admit(config, newcomer, profile.switch_s, clock, dry_run=dry_run)


def _admit(
    config: RunConfig,
    newcomer: Callable[[], AdmittedRun],
    switch_s: float | None,
    clock: Clock,
    *,
    dry_run: bool = False,
    waiting: Waiting | None = None,
) -> Admission:
    """See `admit`. newcomer: makes the record of a new run. waiting: the wait of the run; None without a wait."""
    store, fleet = _fleet_of(config)
    run_id = fleet_layout.run_id(config.run.url)
    if has_left(store, run_id):
        raise ConflictingRecord(f"{config.run.url} has left the fleet {store.url} for good; give the run another url")
    is_new = not exists(store, fleet_layout.admitted(run_id))
    run = newcomer() if is_new else read_run(store, run_id)
    meanwhile = waiting.beat_if_due if waiting is not None else lambda: None
    if is_new:
        _check_queue(store, fleet, run, waiting, clock)
    seen = look_at_rooms(store, fleet, clock, without=run_id, meanwhile=meanwhile)
    found = choices(run, seen.rooms_for(run), fleet.slowdown_max, seen.switch_s if switch_s is None else switch_s)
    names = {each.id: fleet.name_for(run.run_url, each) for each in (run, *seen.runs.values())}
    admission = Admission(run=run, choices=found, names=names, machines=seen.machines)
    if is_new:
        _check_devices(run, seen.rooms)
        _check_memory(run, seen.rooms)
        _check_choices(fleet, admission)
        expected = Prediction(host=found[0].host or None, slowdowns=found[0].slowdowns)
        admission = replace(admission, run=replace(run, predicted=expected, admitted_at_s=clock.wall()))
        if not dry_run and not records.commit(store, fleet_layout.admitted(run_id), admission.run):
            return replace(admission, run=read_run(store, run_id))
    return admission


def admit_at_last(
    config: RunConfig, model: Path, profile: Profile, clock: Clock, say: Callable[[str], None]
) -> Admission:
    """Admit a run as `admit` does; after a MustWaitError, wait and try again.

    say: called with the reason of the wait whenever the reason changes. The run is visible in the fleet's queue, and is
    passed by newcomers for at most the fleet's `patience_s`.
    """
    waiting = Waiting(*_fleet_of(config), config.run.url, clock)
    # A forecast takes long, and writes no heartbeat of the waiting run meanwhile: the forecast is made once.
    newcomer = cache(partial(_new_run, config, model, profile, clock))
    told = ""
    try:
        while True:
            try:
                return _admit(config, newcomer, profile.switch_s, clock, waiting=waiting)
            except MustWaitError as refusal:
                if str(refusal) != told:
                    told = str(refusal)
                    say(told)
            waiting.rest()
    finally:
        waiting.end()


def _fleet_of(config: RunConfig) -> tuple[ObjectStore, FleetRecord]:
    """The fleet of a configuration; raises ValueError unless the fleet allows the run, and no second fleet has it."""
    if config.trainer.fleet is None:
        placement = config.trainer.placement
        raise ValueError(f"trainer.placement: value {placement!r}; allowed in a fleet: 'shared', with trainer.fleet")
    store, fleet = open_fleet(config.trainer.fleet)
    if not fleet.allows(config.run.url):
        raise ValueError(f"run.url: value {config.run.url!r}; allowed in this fleet: below {_or(fleet.run_prefixes)}")
    check_no_other_fleet(config, config.trainer.fleet)
    return store, fleet


def _check_queue(
    store: ObjectStore, fleet: FleetRecord, run: AdmittedRun, waiting: Waiting | None, clock: Clock
) -> None:
    """Raise MustWaitError if a waiting run must be admitted first."""
    if waiting is None:
        waited_s, found = 0.0, waiting_runs(store, fleet, clock)
    else:
        waited_s = waiting.waited_s
        found = waiting_runs(store, fleet, clock, waiting.beat_if_due, without=waiting.incarnation)
    others_s = {each.run_url: each.waited_s for each in found if each.run_url != run.run_url}
    url = may_not_pass(waited_s, others_s, fleet.patience_s)
    if url is not None:
        raise MustWaitError(
            f"{run.run_url} is not admitted: {fleet.name_for_url(run.run_url, url)} waits for longer than the fleet's "
            f"patience_s, {fleet.patience_s:g} s, so no run that came later passes it; wait, too, by --wait"
        )


def _check_devices(run: AdmittedRun, rooms: Sequence[HostRoom]) -> None:
    """Raise ValueError if the fleet has hosts, but no host with exactly as many devices as the run has ranks."""
    found = sorted({room.devices for room in rooms})
    if found and run.ranks not in found:
        raise ValueError(
            f"trainer.nproc_per_node: value {run.ranks} in {run.run_url}; allowed in this fleet: "
            f"{_or([str(each) for each in found])}, the devices of its hosts (gleaner fleet host --devices)"
        )


def _check_memory(run: AdmittedRun, rooms: Sequence[HostRoom]) -> None:
    """Raise ValueError if the fleet has hosts for the run's ranks, but no host with memory for the run's state."""
    largest = max((room.memory_bytes for room in rooms if room.devices == run.ranks), default=run.state_bytes)
    if largest < run.state_bytes:
        raise ValueError(
            f"policy.path: value with a state of {run.state_bytes / GIB:.2f} GiB in {run.run_url}; allowed in this "
            f"fleet: at most {largest / GIB:.2f} GiB, the memory of its largest host (gleaner fleet host --memory-gib)"
        )


def _check_choices(fleet: FleetRecord, admission: Admission) -> None:
    """Raise MustWaitError unless a choice keeps every run within the fleet's `slowdown_max`."""
    run = admission.run
    if not admission.choices:
        raise MustWaitError(
            f"{run.run_url} is not admitted: no host's memory holds {run.state_bytes / GIB:.2f} GiB beside the states "
            "of its runs; start another host"
        )
    best = admission.choices[0]
    beyond = best.beyond(fleet.slowdown_max)
    if beyond:
        slow = ", ".join(f"{admission.names[each]} {best.slowdowns[each]:.2f} times" for each in beyond)
        raise MustWaitError(
            f"{run.run_url} is not admitted: on the best host, {host_name(admission, best)}, cycles would take longer "
            f"than alone: {slow}; allowed in this fleet: {fleet.slowdown_max:g} times; start another host, which takes "
            "a run alone"
        )


def host_name(admission: Admission, choice: Choice) -> str:
    """A host as people know it: the machine, and the beginning of the incarnation."""
    return f"{admission.machines[choice.host]} ({choice.host[:12]})" if choice.host else "a host that could come"


def _new_run(config: RunConfig, model: Path, profile: Profile, clock: Clock) -> AdmittedRun:
    expected = _expected(config, profile)
    pools = config.pools
    return AdmittedRun(
        id=fleet_layout.run_id(config.run.url),
        run_url=config.run.url,
        phase_s=expected.phase_s,
        cycle_s=expected.cycle_s,
        state_bytes=_state_bytes(config, model),
        share=profile.share,
        rollouts_ahead=config.algorithm.max_staleness,
        rollout_gpus=sum(pool.count * pool.gpus for pool in (pools.rollout, *pools.more_rollout.values())),
        trainer_gpus=pools.train.gpus,
        ranks=config.trainer.nproc_per_node,
        rollout_cv=expected.rollout_cv,
        phase_cv=expected.phase_cv,
        admitted_at_s=clock.wall(),
    )


def expected_state_bytes(config: RunConfig, model: Path) -> int:
    """The bytes of a run's resident state, as `resident_state_bytes`.

    Parameters are counted in the headers of the files of `model`; for an id on the hub no weights are downloaded.
    Raises ModelError for unreadable files, and HubError.
    """
    parameters = _parameters(config, policy_of(config), model)
    return int(resident_state_bytes(config, parameters, _teacher_parameters(config)))


def _teacher_parameters(config: RunConfig) -> int:
    """The parameters of all teachers that are at hand; raises as `expected_state_bytes`."""
    teacher, total = config.teacher, 0
    if teacher is None:
        return total
    for name, path in teacher.in_trainer.items():
        # A run that has copied a teacher does without the directory.
        if names_repository(path) or expanded(path).is_dir():
            total += _parameters(config, HubModel(path, teacher.revision, teacher.field_of(name)), expanded(path))
    return total


def _parameters(config: RunConfig, model: HubModel, directory: Path) -> int:
    return hub_parameters(config, model) if names_repository(model.repo) else count_parameters(directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """As in AdmittedRun."""

    phase_s: float
    cycle_s: float
    rollout_cv: float | None = None
    phase_cv: float | None = None


def _expected(config: RunConfig, profile: Profile) -> _Expected:
    """The operator's times, else the medians of the run's reports, else (without reports) a forecast."""
    store = connect(config.run.url)
    found = reports(store) if holds_run(store) else []
    phase_s, cycle_s = profile.phase_s, profile.cycle_s
    if found and phase_s is None:
        phase_s = statistics.median(report.metrics["timing_s/compute"] for report in found)
    if found and cycle_s is None:
        cycle_s = measured_cycle_s(found)
    if phase_s is not None and cycle_s is not None:
        return _Expected(phase_s=phase_s, cycle_s=cycle_s)
    missing = "--phase-s" if phase_s is None else "--cycle-s"
    try:
        forecast = expected_profile(config)
    except (Stalled, ValueError, LookupError) as error:
        raise ValueError(
            f"{missing}: value missing; allowed: seconds above 0, because the run has no iteration yet, and cannot be "
            f"forecast: {error}"
        ) from error
    return _Expected(
        phase_s=forecast.phase_s if phase_s is None else phase_s,
        cycle_s=forecast.cycle_s if cycle_s is None else cycle_s,
        rollout_cv=forecast.rollout_cv,
        phase_cv=forecast.phase_cv,
    )


def _state_bytes(config: RunConfig, model: Path) -> int:
    """The bytes by the model's files; without local files, by `forecast.parameters_billions` if configured."""
    billions = config.forecast.parameters_billions
    if billions is not None and not model.is_dir():
        return int(resident_state_bytes(config, billions * 1e9))
    return expected_state_bytes(config, model)


def _or(prefixes: Sequence[str]) -> str:
    return " or ".join(prefixes)
