"""The states of runs in a host's memory, and which states to evict: pure.

A resident state is a cache entry of a checkpoint: equal to the checkpoint whose digest the entry carries, dropped at
any time, and never written back. The object store has every checkpoint. The state expected to be needed last is
dropped first (Belady, IBM Systems Journal 5(2), 1966): a host knows about how long each run's cycle takes.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from tasks.configuration.run_config import RunConfig
from tasks.planning.trainer_memory import frozen_bytes, kept_bytes

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A run's state, in host memory or not.

    Attributes:
        run: The run's id.
        num_bytes: Bytes that the state takes in host memory; 0 if absent.
        state_bytes: Bytes that the state would take in host memory.
        needed_s: The time at which the state is expected to be needed next, seconds of the host.
        busy: The state is in use, being read or being published.
    """

    run: str
    num_bytes: int
    state_bytes: int
    needed_s: float
    busy: bool = False


def resident_state_bytes(config: RunConfig, parameters: float, teachers: float = 0.0) -> float:
    """The bytes of a run's resident state: float32 parameters and moments, the reference, the critic and teachers.

    parameters: of the policy. teachers: parameters of all teachers together.
    """
    # The moments under adapters are those of the adapters, which are small beside the model.
    held = FLOAT32_BYTES if config.lora is not None else kept_bytes(config.optimizer)
    if config.lora is None and config.algorithm.needs_reference:
        held += FLOAT32_BYTES
    if config.algorithm.estimator.needs_critic:
        held += kept_bytes(config.critic.optimizer)
    return held * parameters + frozen_bytes(config) * teachers


def is_usable(resident_digest: str | None, checkpoint_digest: str) -> bool:
    """Whether a phase that begins from a checkpoint may use the resident state instead of reading the checkpoint.

    A different host may have trained the last phase, with different last bits. The digests then differ, and the run
    goes on from the stored state.
    """
    return resident_digest is not None and resident_digest == checkpoint_digest


def expected_s(begun_s: float, cycle_s: float, now_s: float) -> float:
    """When a run's next phase is expected, if the last phase began at `begun_s`.

    A phase late by x seconds is expected in x seconds, so the state of a finished run becomes the first to evict.
    """
    at_s = begun_s + cycle_s
    return at_s if at_s >= now_s else now_s + (now_s - at_s)


def make_room(residents: Collection[Resident], num_bytes: int, capacity_bytes: int) -> tuple[str, ...]:
    """The runs whose states have to leave memory to make room for `num_bytes` more, the last needed first.

    Busy states stay, so room may be lacking even afterwards.
    """
    excess = sum(one.num_bytes for one in residents) + num_bytes - capacity_bytes
    going = []
    for one in sorted(residents, key=lambda one: (-one.needed_s, one.run)):
        if excess > 0 and not one.busy and one.num_bytes > 0:
            going.append(one.run)
            excess -= one.num_bytes
    return tuple(going)


def has_room(residents: Collection[Resident], num_bytes: int, capacity_bytes: int) -> bool:
    """Whether memory holds `num_bytes` beside the residents that `make_room` does not evict."""
    going = make_room(residents, num_bytes, capacity_bytes)
    return sum(one.num_bytes for one in residents if one.run not in going) + num_bytes <= capacity_bytes


def choose_prefetch(
    residents: Collection[Resident], capacity_bytes: int, is_ready: Callable[[str], bool]
) -> tuple[str, tuple[str, ...]] | None:
    """The run whose state should be read into host memory ahead of its phase, and the runs whose states are evicted.

    The candidate is the first needed run that is ready, is not busy, and has no state in memory. States needed earlier
    stay; a candidate that does not fit beside them is not read ahead. None: nothing to read.
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
