"""The states of runs that are kept near a trainer, and which of them have to go: pure.

A resident state is a cache of a checkpoint: it equals the checkpoint whose digest it carries, so it may be dropped at
any time and nothing is ever written back. It lies in host memory; the object store has every checkpoint anyway. What is
dropped first is what is expected to be needed last (Belady, IBM Systems Journal 5(2), 1966): a host knows about how
long each run's cycle takes.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from tasks.configuration.run_config import RunConfig
from tasks.planning.trainer_memory import kept_bytes

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A run's state in host memory. num_bytes: what it takes there, 0 if it is not there.

    state_bytes: what it would take there. needed_s: when it is expected to be needed next. busy: it is in use, being
    made or being published.
    """

    run: str
    num_bytes: int
    state_bytes: int
    needed_s: float
    busy: bool = False


def resident_state_bytes(config: RunConfig, parameters: float) -> float:
    """The bytes of a run's resident state: float32 parameters and moments, the reference, and the critic."""
    # The moments under adapters are those of the adapters, which are small beside the model.
    held = FLOAT32_BYTES if config.lora is not None else kept_bytes(config.optimizer)
    if config.lora is None and config.algorithm.kl_coef > 0:
        held += FLOAT32_BYTES
    if config.algorithm.estimator.needs_critic:
        held += kept_bytes(config.critic.optimizer)
    return held * parameters


def is_usable(resident_digest: str | None, checkpoint_digest: str) -> bool:
    """Whether a phase that begins from this checkpoint may use the resident state instead of reading the checkpoint.

    Another host may have trained the last phase, with other last bits. Then the digests differ, and the state that the
    run goes on from is the one that is stored.
    """
    return resident_digest is not None and resident_digest == checkpoint_digest


def expected_s(begun_s: float, cycle_s: float, now_s: float) -> float:
    """When a run's next phase is expected, if the last one began at `begun_s`.

    A run that is late is expected after as long again as it is late, so that one which has ended is forgotten.
    """
    at_s = begun_s + cycle_s
    return at_s if at_s >= now_s else now_s + (now_s - at_s)


def make_room(residents: Collection[Resident], num_bytes: int, capacity_bytes: int) -> tuple[str, ...]:
    """The runs whose states have to leave memory so that it has room for `num_bytes` more, the last needed first.

    Busy states stay; so there may be too little room even afterwards.
    """
    excess = sum(one.num_bytes for one in residents) + num_bytes - capacity_bytes
    going = []
    for one in sorted(residents, key=lambda one: (-one.needed_s, one.run)):
        if excess > 0 and not one.busy and one.num_bytes > 0:
            going.append(one.run)
            excess -= one.num_bytes
    return tuple(going)


def has_room(residents: Collection[Resident], num_bytes: int, capacity_bytes: int) -> bool:
    """Whether memory holds `num_bytes` beside all these states, once those have left that `make_room` names."""
    going = make_room(residents, num_bytes, capacity_bytes)
    return sum(one.num_bytes for one in residents if one.run not in going) + num_bytes <= capacity_bytes


def choose_prefetch(
    residents: Collection[Resident], capacity_bytes: int, is_ready: Callable[[str], bool]
) -> tuple[str, tuple[str, ...]] | None:
    """The run whose state is to be read into host memory ahead of its phase, and the runs whose states leave for it.

    That is the first run to be needed that is ready and not busy and has no state there. States that are needed before
    it stay; if it does not fit beside them, nothing is read ahead. None: nothing is to be done.
    """
    for one in sorted(residents, key=lambda one: (one.needed_s, one.run)):
        if one.num_bytes or one.busy or not is_ready(one.run):
            continue
        others = [
            replace(other, busy=other.busy or other.needed_s <= one.needed_s)
            for other in residents
            if other.run != one.run
        ]
        if has_room(others, one.state_bytes, capacity_bytes):
            return one.run, make_room(others, one.state_bytes, capacity_bytes)
        return None
    return None
