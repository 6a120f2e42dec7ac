"""A cache of trainer states in a host's memory: decides by the rules of `residents`, and orders the workers."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from storage.fleet.fleet_records import AdmittedRun, HostRecord
from tasks.sharing.residents import Resident, choose_prefetch, make_room
from tasks.sharing.workers import PhaseWorkers, Restored

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Need:
    """A run of the host. needed_s: when the run's state is expected to be needed next, seconds of the host."""

    run: AdmittedRun
    needed_s: float


class StateCache:
    """The states of a host's runs that lie in host memory.

    The object store has every state, so ending a worker is enough to evict the worker's state.
    """

    def __init__(self, workers: PhaseWorkers, host: HostRecord, note: Callable[[str, int, Restored], None]) -> None:
        """note: called once per restored state, with run, iteration and the way of restoring."""
        self._workers = workers
        self._memory_bytes = host.memory_bytes
        self._note = note
        self._noted: dict[str, Restored | None] = {}
        # The iteration for which a worker was last told to read ahead, by run.
        self._prefetched: dict[str, int] = {}

    def begin(self, run: AdmittedRun, iteration: int, needs: Collection[Need]) -> None:
        """Make room in host memory for the state of a run, and let the run's worker train a phase.

        needs: one for each run of the host.
        """
        self.note_restored(each.run.id for each in needs)
        others = [one for one in self._in_memory(needs) if one.run != run.id]
        self._leave_memory(make_room(others, run.state_bytes, self._memory_bytes), run)
        self._workers.begin(run, iteration)

    def prefetch(self, needs: Collection[Need], ready: Mapping[str, int]) -> None:
        """Let one worker at a time read ahead the next needed state.

        ready: the next iteration to train, by run, for runs whose next iteration is planned.
        """
        self.note_restored(each.run.id for each in needs)
        phases = {each.run.id: self._workers.state(each.run.id).phase for each in needs}
        if "prefetching" in phases.values():
            return

        def is_ready(run: str) -> bool:
            return run in ready and self._prefetched.get(run) != ready[run] and phases[run] != "failed"

        chosen = choose_prefetch(self._in_memory(needs), self._memory_bytes, is_ready)
        if chosen is not None:
            [run] = [each.run for each in needs if each.run.id == chosen[0]]
            self._leave_memory(chosen[1], run)
            self._prefetched[run.id] = ready[run.id]
            self._workers.prefetch(run, ready[run.id])

    def note_restored(self, runs: Iterable[str]) -> None:
        """Note how the states of `runs` were restored, in time: a worker forgets at the next order and at its end."""
        for run in runs:
            state = self._workers.state(run)
            if state.restored is not None and state.iteration is not None and state.restored != self._noted.get(run):
                self._note(run, state.iteration, state.restored)
            self._noted[run] = state.restored

    def drop(self, run: str) -> None:
        """End the run's worker, which drops the run's state from host memory."""
        self.note_restored([run])
        self._workers.evict(run)
        self._prefetched.pop(run, None)

    def _in_memory(self, needs: Collection[Need]) -> list[Resident]:
        """One Resident per need; 0 bytes if the state is not in memory. A busy worker counts with its whole state."""
        residents = []
        for each in needs:
            state, run = self._workers.state(each.run.id), each.run
            busy = state.is_busy or state.phase == "prefetching"
            held = max(state.bytes_held, run.state_bytes if busy else 0)
            residents.append(
                Resident(run=run.id, num_bytes=held, state_bytes=run.state_bytes, needed_s=each.needed_s, busy=busy)
            )
        return residents

    def _leave_memory(self, going: Collection[str], coming: AdmittedRun) -> None:
        for run in going:
            log.info("the state of run %s leaves host memory for that of run %s", run, coming.id)
            self._workers.evict(run)
            self._prefetched.pop(run, None)
